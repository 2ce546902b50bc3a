"""A group of real processes that run one model together, driven from a test."""

from __future__ import annotations

import multiprocessing
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from worker.core.types import Batch
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.model.communicator import Communicator, SoloCommunicator
from worker.model.loader import load
from worker.model.runner import ModelRunner
from worker.model.shared_memory import SharedMemoryCommunicator

TOKENS_PER_BLOCK = 8
NUM_PAGES = 64
WAIT_S = 60.0
Task = Callable[..., Any]
"""Called as task(communicator, state, *arguments); `state` is the rank's own, from one call to the next."""


def load_model(communicator: Communicator, state: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Load the model of `folder` under that name, with an empty pool."""
    if str(folder) in state:
        return
    model = load(folder, communicator, torch.device("cpu"), dtype)
    facts = model.facts
    layout = KvLayout(
        facts.num_layers, facts.num_kv_heads, facts.head_dim, TOKENS_PER_BLOCK, facts.dtype, *facts.kv_heads
    )
    state[str(folder)] = ModelRunner(model, communicator, DevicePool(layout, NUM_PAGES, torch.device("cpu")))


def run_batch(communicator: Communicator, state: dict[str, Any], folder: Path, batch: Batch) -> torch.Tensor | None:
    runner: ModelRunner = state[str(folder)]
    return runner.run(batch)


class RankGroup:
    """`call` runs one task on every rank at once and returns their answers in rank order."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    @property
    def world_size(self) -> int:
        return len(self._connections)

    def call(self, task: Task, *arguments: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((task, arguments))
        answers = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(WAIT_S), f"rank {rank} does not answer"
            answer, trouble = connection.recv()
            assert not trouble, f"rank {rank}: {trouble}"
            answers.append(answer)
        return answers

    def logits(self, folder: Path, batch: Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.call(load_model, folder, dtype)
        answers = self.call(run_batch, folder, batch)
        assert all(answer is None for answer in answers[1:])
        assert isinstance(answers[0], torch.Tensor)
        return answers[0]


@contextmanager
def rank_group(world_size: int) -> Iterator[RankGroup]:
    context = multiprocessing.get_context("spawn")
    meeting = Path("/dev/shm") / f"kinroute-test-{secrets.token_hex(8)}"  # noqa: S108
    connections, processes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, meeting, rank, world_size), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield RankGroup(connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
        meeting.unlink(missing_ok=True)


def _serve(connection: Connection, meeting: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    communicator: Communicator = SoloCommunicator()
    if world_size > 1:
        communicator = SharedMemoryCommunicator(meeting, rank, world_size, slot_bytes=1 << 14, deadline_s=30.0)
    state: dict[str, Any] = {}
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((task(communicator, state, *arguments), ""))
        except Exception:  # noqa: BLE001 - the test shows it
            connection.send((None, traceback.format_exc()))
