"""A real worker for tests: launcher, ranks and sockets, started and stopped by a context manager."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.openengine_client import Engine
from kinroute.processes import Child, News

START_DEADLINE_S = 90.0
STOP_GRACE_S = 15.0
MODEL_NAME = "tiny"


@dataclass
class Running:
    """One worker process tree."""

    child: Child
    news: queue.SimpleQueue[News]
    heard: list[News] = field(default_factory=list)
    grpc: str = ""
    admin: str = ""

    def wait_for(self, event: str, count: int = 1, deadline_s: float = START_DEADLINE_S) -> News:
        """The `count`-th time it said `event`."""
        end_s = time.monotonic() + deadline_s
        while True:
            said = [news for news in self.heard if news.event == event]
            if len(said) >= count:
                return said[count - 1]
            try:
                self.heard.append(self.news.get(timeout=max(0.0, end_s - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"it did not say {event}:\n{self.child.last_lines(40)}") from None
            if self.heard[-1].event == "exited" and event != "exited":
                raise AssertionError(f"it ended, {self.heard[-1].members}:\n{self.child.last_lines(40)}")

    @property
    def engine(self) -> Engine:
        return Engine(self.grpc, MODEL_NAME)

    def ranks(self) -> list[psutil.Process]:
        """Its rank processes, rank 0 first."""
        children = psutil.Process(self.child.pid).children()
        return sorted(children, key=lambda process: int(process.environ()["RANK"]))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=30.0) as response:
            return json.loads(response.read())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of `name` that have these labels."""
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=30.0) as response:
            return metric_of(response.read().decode(), name, **labels)

    def leaks(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/kinroute/v1/leaks")
        return answer

    def wait_clean(self, deadline_s: float = 20.0) -> None:
        """Until no rank holds anything."""
        end_s = time.monotonic() + deadline_s
        while not (leaks := self.leaks())["clean"]:
            assert time.monotonic() < end_s, f"still held: {leaks}"
            time.sleep(0.05)


def metric_of(text: str, name: str, **labels: str) -> float:
    """The sum of all series of `name` that have these labels, in what `/metrics` answered."""
    found = 0.0
    for series, value in re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE):
        if all(f'{label}="{expected}"' in series for label, expected in labels.items()):
            found += float(value)
    return found


@contextmanager
def worker(folder: Path, model: Path, name: str = "worker", **config: Any) -> Iterator[Running]:
    """A worker that has said where it listens; `wait_for("ready")` waits for the rest."""
    given = {
        "model": str(model),
        "served_model_name": MODEL_NAME,
        "listen": {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "device": "cpu",
        "dtype": "float32",
        "threads_per_rank": 1,
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 4096},
        "log": {"format": "console"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(given | config))
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    running = Running(Child(name, ["worker", "--config", str(file)], folder / f"{name}.log", news), news)
    try:
        listening = running.wait_for("listening")
        running.grpc, running.admin = listening.members["grpc"], listening.members["admin"]
        yield running
    finally:
        running.child.stop(STOP_GRACE_S)
