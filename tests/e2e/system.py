"""Real workers and edges for tests: processes, sockets and a model, started and stopped by a context manager."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import yaml

from edge.core.types import Scope
from edge.keyring import ApiKey, KeyFile, Keyring, digest_of, new_api_key, new_id
from kinroute.processes import Child, News

START_DEADLINE_S = 90.0
STOP_GRACE_S = 15.0


@dataclass(slots=True)
class Part:
    """One started process and what it said last: `members` of its `listening` line."""

    child: Child
    members: dict[str, Any] = field(default_factory=dict)

    @property
    def grpc(self) -> str:
        return str(self.members["grpc"])

    @property
    def http(self) -> str:
        return f"http://{self.members['http']}"

    @property
    def admin(self) -> str:
        return f"http://{self.members['admin']}"


class System:
    """Starts parts in `folder`; all share one key file. Stops them, edges first, when the `with` block ends."""

    def __init__(self, folder: Path, model: Path, served_name: str = "tiny") -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._model = model
        self._served_name = served_name
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._heard: dict[str, list[News]] = {}
        self.parts: dict[str, Part] = {}
        self.keyring = Keyring.open(folder / "keys.json")
        self.keyring.write_worker_keys(folder / "worker-keys.json")

    @property
    def key(self) -> str:
        return self.keyring.local_key

    def add_key(self, subject: str) -> str:
        """Another API key of the same tenant, which may name parents; for edges that start after this."""
        secret = new_api_key()
        added = ApiKey(new_id(), digest_of(secret), "default", subject, (Scope.AFFINITY.value,))

        def change(content: KeyFile) -> KeyFile:
            return msgspec.structs.replace(content, api_keys=(*content.api_keys, added))

        self.keyring = Keyring.change(self.keyring.path, change)
        return secret

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in reversed(self.parts.values()):
            part.child.stop(STOP_GRACE_S)

    def start_worker(self, name: str, **config: Any) -> Part:
        """Start without waiting until it is ready; `listening` is known when this returns."""
        given = {
            "model": str(self._model),
            "served_model_name": self._served_name,
            "keys_file": str(self._folder / "worker-keys.json"),
            "listen": {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "device": "cpu",
            "dtype": "float32",
            "threads_per_rank": 1,
        }
        return self._start("worker", name, given | config)

    def start_edge(self, name: str, context: list[Part], generation: list[Part], **config: Any) -> Part:
        given = {
            "listen": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "model": {"name": self._served_name, "path": str(self._model)},
            "keys_file": str(self.keyring.path),
            "context_servers": [part.grpc for part in context],
            "generation_servers": [part.grpc for part in generation],
        }
        return self._start("edge", name, given | config)

    def wait_ready(self, *parts: Part) -> None:
        for part in parts:
            self.wait_for(part, "ready")

    def wait_for(self, part: Part, event: str, count: int = 1, deadline_s: float = START_DEADLINE_S) -> News:
        """The `count`-th time that `part` said `event`."""
        name = part.child.name
        end_s = time.monotonic() + deadline_s
        while True:
            said = [news for news in self._heard.get(name, []) if news.event == event]
            if len(said) >= count:
                return said[count - 1]
            try:
                news = self._news.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"{name} did not say {event} in {deadline_s} s:\n{part.child.last_lines()}"
                ) from None
            self._heard.setdefault(news.child, []).append(news)
            if news.event == "exited" and news.child == name and event != "exited":
                raise AssertionError(f"{name} ended, {news.members}:\n{part.child.last_lines(40)}")

    def _start(self, command: str, name: str, config: dict[str, Any]) -> Part:
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        part = Part(Child(name, [command, "--config", str(file)], self._folder / f"{name}.log", self._news))
        self.parts[name] = part
        part.members = self.wait_for(part, "listening").members
        return part
