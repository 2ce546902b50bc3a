"""Signing keys rotated beneath streamed requests: an edge, a worker, and families that notice nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from edge.keyring import KeyFile, Keyring
from enginelink.compact_jwt import signing_key
from kinroute.__main__ import main
from tests.e2e.system import System
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
WAIT_S = 30.0
TOKENS = 12


class Family:
    """A parent, and children one after the other, each with the token that the parent's first answer had."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self._client = client
        self._name = name
        self._lineage = ""
        self.children = 0
        self.wrong: list[str] = []

    def play(self, ended: threading.Event) -> None:
        try:
            self._lineage = self._ask("parent", {})
            while not ended.is_set():
                self._ask(f"child-{self.children}", {"x-kinroute-lineage": self._lineage})
                self.children += 1
        except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
            self.wrong.append(repr(error))

    def _ask(self, conversation: str, headers: dict[str, str]) -> str:
        """The answer's lineage token."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{self._name} {conversation}"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = headers | {"x-kinroute-conversation-id": f"{self._name}-{conversation}"}
        with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
        assert lines[-1] == "data: [DONE]", lines
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] >= 1, lines
        return str(answer.headers["x-kinroute-lineage"])


def test_rotation_under_load_fails_no_request_and_loses_no_parent(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with System(tmp_path / "system", model) as system:
        worker = system.start_worker(
            "worker",
            role="aggregated",
            kv_cache_config={"max_tokens": 65_536, "block_reuse_config": {"policy": "per_conversation"}},
        )
        edge = system.start_edge("edge", [worker], [worker], affinity={"proof": "token"})
        system.wait_ready(worker, edge)
        file, worker_file = system.keyring.path, tmp_path / "system" / "worker-keys.json"
        ended = threading.Event()
        headers = {"authorization": f"Bearer {system.key}"}
        with httpx.Client(base_url=edge.http, headers=headers, timeout=WAIT_S) as client:
            families = [Family(client, name) for name in ("a", "b", "c")]
            threads = [threading.Thread(target=family.play, args=[ended]) for family in families]
            for thread in threads:
                thread.start()
            for _ in range(2):
                rotate(file, worker_file)
                done = [family.children for family in families]
                wait_until(lambda done=done: all(f.children > n + 3 for f, n in zip(families, done, strict=True)))
            ended.set()
            for thread in threads:
                thread.join(WAIT_S)

        assert [family.wrong for family in families] == [[], [], []]
        conversations = httpx.get(f"{worker.admin}/kinroute/v1/families?limit=1000").json()["conversations"]
        known = [one for one in conversations if one["parent"]]
        assert len(known) == sum(family.children for family in families), "every child's parent was believed"


def rotate(file: Path, worker_file: Path) -> None:
    """To a new key for everything; the old envelope key is then taken away, so that only the new one can sign."""
    arguments = ["--keys-file", str(file), "--sign-from-in", "3s", "--export-worker", str(worker_file)]
    assert main(["keys", "rotate", *arguments]) == 0
    new = Keyring.load(file).envelope_keys[-1]
    wait_until(lambda: signing_key(Keyring.load(file).envelope_keys, time.time()) == new)

    def forget(content: KeyFile) -> KeyFile:
        return msgspec.structs.replace(content, envelope_keys=content.envelope_keys[-1:])

    # What an edge signed just before is on its way to the worker, which still has both.
    Keyring.change(file, forget)


def wait_until(is_so: object) -> None:
    assert callable(is_so)
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.05)
