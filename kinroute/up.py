"""`kinroute up`: one edge and its workers on this machine, started, watched and stopped together."""

from __future__ import annotations

import json
import queue
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from configuration.locks import held
from edge.key_watch import stamp_of
from edge.keyring import Keyring, KeyringError
from kinroute import model_cache, paths, settings
from kinroute.problem import Problem
from kinroute.processes import Child, News
from kinroute.progress import Steps

READY_DEADLINE_S = 180.0
STOP_GRACE_S = 20.0
NOTE = "up.json"
KEYS_POLL_S = 1.0


class Stopped(Exception):
    """Raised in the main thread when a person or the system asks us to stop."""


def up(config_file: Path | None, *, port: int | None, admin_port: int | None, new_key: bool) -> int:
    """Run until Ctrl-C or SIGTERM; returns 0 then. Raises Problem where something keeps it from starting or running."""
    config = settings.read(config_file)
    listen = _listen(config, port, admin_port)
    note = paths.state_folder() / NOTE
    with held(paths.state_folder() / "up.lock", wait=False) as free:
        if not free:
            raise Problem(_already_running(note))
        for flag, address in listen.items():
            _require_free(address, {"http": "--port", "admin": "--admin-port"}[flag])
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        try:
            keyring = Keyring.open(paths.config_folder() / "keys.json", new_key=new_key)
        except KeyringError as error:
            raise Problem(str(error)) from error
        system = System(config, listen, keyring)
        try:
            with Steps() as steps:
                system.start(steps)
            urls = _urls(config, listen)
            note.write_text(json.dumps({**urls, "workers": system.worker_admins}))
            sys.stdout.write(_greeting(urls["url"], system.grpc, keyring.local_key, system.served_name))
            sys.stdout.flush()
            system.watch()
        except Stopped:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.stderr.write("\nStopping ...\n")
        finally:
            note.unlink(missing_ok=True)
            system.stop()
    return 0


def read_note() -> dict[str, Any]:
    """What `up` wrote of the system that it runs here; empty: it runs none."""
    try:
        note = json.loads((paths.state_folder() / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _listen(config: dict[str, Any], port: int | None, admin_port: int | None) -> dict[str, str]:
    """Addresses of the edge's two listeners: as configured, ports replaced by the flags."""
    configured = config["edge"].get("listen") or {}
    listen = {}
    for name, default, flag in (("http", "127.0.0.1:8000", port), ("admin", "127.0.0.1:8001", admin_port)):
        address = configured.get(name, default)
        if isinstance(address, dict):
            address = address.get("address", default)
        host, _, own = str(address).rpartition(":")
        listen[name] = f"{host}:{own if flag is None else flag}"
    return listen


def _require_free(address: str, flag: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Problem(
            f"The edge cannot listen on {address} ({reason.lower()}): end the program that uses the port, or choose "
            f"another port with {flag} N."
        ) from error


def _urls(config: dict[str, Any], listen: dict[str, str]) -> dict[str, str]:
    """Of the edge's two listeners, as others of this machine may know them."""
    configured = config["edge"].get("listen") or {}
    admin = configured.get("admin")
    is_secured = {"url": configured, "admin": admin if isinstance(admin, dict) else {}}
    addresses = {"url": listen["http"], "admin": listen["admin"]}
    return {name: f"http{'s' if is_secured[name].get('tls') else ''}://{addresses[name]}" for name in addresses}


def _already_running(note: Path) -> str:
    try:
        url = json.loads(note.read_text())["url"]
    except (OSError, ValueError, KeyError):
        return "Kinroute is already starting here: wait until it is ready, or stop it with Ctrl-C in its terminal."
    return f"Kinroute already runs here, at {url}: use it, or stop it with Ctrl-C in its terminal."


class System:
    """The processes of one `up`. `start` them, `watch` until told, `stop` them; `stop` is safe at any time."""

    def __init__(self, config: dict[str, Any], listen: dict[str, str], keyring: Keyring) -> None:
        self._config = config
        self._listen = listen
        self._stamp = stamp_of(keyring.path)
        self._keyring = keyring
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kinroute-up-")
        self._worker_keys = Path(self._folder.name) / "worker-keys.json"
        self.served_name = ""
        self.worker_admins: dict[str, str] = {}
        self.grpc = ""
        """Where the edge speaks OpenEngine; empty where it does not."""

    def start(self, steps: Steps) -> None:
        """Returns when every worker and the edge said that they are ready. Raises Problem."""
        model = self._model(steps)
        heard: dict[str, dict[str, News]] = {}
        steps.begin("Starting workers")
        workers = self._start_workers(model)
        self._wait(heard, workers, "listening")
        said = [heard[name]["listening"].members for name in workers]
        self.worker_admins = {str(one["grpc"]): f"http://{one['admin']}" for one in said}
        edge = self._start_edge(model, {name: heard[name]["listening"] for name in workers})
        self._wait(heard, workers, "ready", steps)
        steps.end("Starting workers")
        steps.begin("Starting the edge")
        self._wait(heard, {edge: {}}, "ready")
        self.grpc = str(heard[edge]["listening"].members.get("grpc", ""))
        steps.end("Starting the edge")

    def watch(self) -> None:
        """Wait; raises Problem when a process ends by itself."""
        while True:
            try:
                news = self._news.get(timeout=KEYS_POLL_S)
            except queue.Empty:
                self._give_keys()
                continue
            if news.event == "exited":
                raise Problem(self._ended(news))
            if news.event == "restarting":
                sys.stderr.write(f"{news.child} restarts its ranks: {news.members.get('why', 'no reason given')}\n")

    def _give_keys(self) -> None:
        """Where the key file changed, workers get its envelope keys; one that cannot be used changes nothing."""
        stamp = stamp_of(self._keyring.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keyring = Keyring.load(self._keyring.path)
        except KeyringError as error:
            sys.stderr.write(f"The workers' keys stay as they were. {error}\n")
            return
        self._keyring.write_worker_keys(self._worker_keys)

    def stop(self) -> None:
        """The edge first, so that no request meets a worker that is gone."""
        for child in reversed(self._children):
            child.stop(STOP_GRACE_S)
        self._folder.cleanup()

    def _model(self, steps: Steps) -> Path:
        wanted = self._config["model"]
        if wanted == settings.EMBEDDED:
            self.served_name = model_cache.NAME
            return model_cache.embedded_model(steps)
        folder = Path(str(wanted)).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise Problem(f"The model folder {folder} has no config.json: set `model` to a Hugging Face model folder.")
        self.served_name = folder.name
        return folder

    def _start_workers(self, model: Path) -> dict[str, dict[str, Any]]:
        self._keyring.write_worker_keys(self._worker_keys)
        workers: dict[str, dict[str, Any]] = {}
        for number, own in enumerate(self._config["workers"]):
            role = own.get("role", "aggregated")
            name = f"{role}-{number}"
            given: dict[str, Any] = {
                "model": str(model),
                "served_model_name": self.served_name,
                "keys_file": str(self._worker_keys),
            }
            workers[name] = given | own
            workers[name]["listen"] = {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"} | (own.get("listen") or {})
            self._start("worker", name, workers[name])
        return workers

    def _start_edge(self, model: Path, listening: dict[str, News]) -> str:
        servers: dict[str, list[str]] = {"context": [], "generation": []}
        for name, news in listening.items():
            role = name.rpartition("-")[0]
            for phase in ("context", "generation") if role == "aggregated" else (role,):
                servers[phase].append(news.members["grpc"])
        given: dict[str, Any] = {
            "model": {"name": self.served_name, "path": str(model)},
            "keys_file": str(self._keyring.path),
            "context_servers": servers["context"],
            "generation_servers": servers["generation"],
        }
        own = self._config["edge"]
        listen = {"grpc": "127.0.0.1:0"} | (own.get("listen") or {}) | {"http": self._listen["http"]}
        admin = listen.get("admin")
        listen["admin"] = (admin if isinstance(admin, dict) else {}) | {"address": self._listen["admin"]}
        self._start("edge", "edge", given | own | {"listen": listen})
        return "edge"

    def _start(self, command: str, name: str, config: dict[str, Any]) -> None:
        file = Path(self._folder.name) / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        logs = paths.state_folder() / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{name}.log"
        log.unlink(missing_ok=True)
        self._children.append(Child(name, [command, "--config", str(file)], log, self._news))

    def _wait(
        self, heard: dict[str, dict[str, News]], names: dict[str, Any], event: str, steps: Steps | None = None
    ) -> None:
        """Until each of `names` said `event`; keeps whatever else is said in `heard`."""
        deadline_s = time.monotonic() + READY_DEADLINE_S
        while not all(event in heard.setdefault(name, {}) for name in names):
            try:
                news = self._news.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                late = ", ".join(name for name in names if event not in heard[name])
                logs = paths.state_folder() / "logs"
                raise Problem(f"{late} did not start within {READY_DEADLINE_S:.0f} s; its log is in {logs}.") from None
            if news.event == "exited":
                raise Problem(self._ended(news))
            heard.setdefault(news.child, {})[news.event] = news
            if steps is not None:
                done = sum(event in heard[name] for name in names)
                steps.advance("Starting workers", done / len(names))

    def _ended(self, news: News) -> str:
        child = next(child for child in self._children if child.name == news.child)
        return (
            f"{child.last_lines()}\n{news.child} ended with code {news.members['code']}; its whole log is {child.log}."
        )


def _greeting(url: str, grpc: str, key: str, model: str) -> str:
    base = f"{url}/v1"
    openengine = f"OpenEngine (gRPC) is served at {grpc}\n" if grpc else ""
    command = Path(sys.executable).with_name("kinroute")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    return f"""
Kinroute is ready at {base}
{openengine}API key: {key}

  curl {base}/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{base}", api_key="{key}")
  print(client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}]))

  export OPENAI_BASE_URL={base} OPENAI_API_KEY={key}

In another terminal, `{command} demo` plays a family of agents. Ctrl-C stops everything.
"""
