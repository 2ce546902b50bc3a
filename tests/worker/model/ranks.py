"""A group of real processes that run one model together, driven from a test."""

from __future__ import annotations

import multiprocessing
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from worker.core.types import Batch
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.model.communicator import Communicator, ProcessGroupCommunicator, SoloCommunicator
from worker.model.loader import load
from worker.model.runner import ModelRunner
from worker.model.shared_memory import SharedMemoryCommunicator

TOKENS_PER_BLOCK = 8
NUM_PAGES = 64
WAIT_S = 60.0
Task = Callable[..., Any]
"""Called as task(communicator, state, *arguments); `state` is the rank's own, from one call to the next."""
Join = Callable[[Path, int, int], Communicator]
SLOT_BYTES = 1 << 14


def join_shared_memory(meeting: Path, rank: int, world_size: int) -> Communicator:
    if world_size == 1:
        return SoloCommunicator()
    return SharedMemoryCommunicator(meeting, rank, world_size, slot_bytes=SLOT_BYTES, deadline_s=30.0)


def join_gloo(meeting: Path, rank: int, world_size: int) -> Communicator:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    return ProcessGroupCommunicator()


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

    def __init__(self, connections: list[Connection], processes: list[ForkServerProcess]) -> None:
        self._connections = connections
        self._processes = processes

    @property
    def world_size(self) -> int:
        return len(self._connections)

    def call(self, task: Task, *arguments: Any) -> list[Any]:
        for rank in range(self.world_size):
            self.begin(rank, task, *arguments)
        return [self.end(rank) for rank in range(self.world_size)]

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def begin(self, rank: int, task: Task, *arguments: Any) -> None:
        self._connections[rank].send((task, arguments))

    def end(self, rank: int) -> Any:
        """The answer to what `begin` sent; raises AssertionError with the rank's own story."""
        assert self._connections[rank].poll(WAIT_S), f"rank {rank} does not answer"
        answer, trouble = self._connections[rank].recv()
        assert not trouble, f"rank {rank}: {trouble}"
        return answer

    def logits(self, folder: Path, batch: Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.call(load_model, folder, dtype)
        answers = self.call(run_batch, folder, batch)
        assert all(answer is None for answer in answers[1:])
        assert isinstance(answers[0], torch.Tensor)
        return answers[0]


@contextmanager
def rank_group(world_size: int, join: Join = join_shared_memory) -> Iterator[RankGroup]:
    # Its server imports torch and transformers once and forks each rank, in which no thread runs yet.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    meeting = Path("/dev/shm") / f"kinroute-test-{secrets.token_hex(8)}"  # noqa: S108
    connections, processes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, join, meeting, rank, world_size), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield RankGroup(connections, processes)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
        meeting.unlink(missing_ok=True)


def _serve(connection: Connection, join: Join, meeting: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    communicator = join(meeting, rank, world_size)
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
