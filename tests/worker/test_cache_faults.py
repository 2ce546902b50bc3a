"""Faults that other cache managers had, where real memory, a disk or an engine thread is needed.

The others are in `tests/worker/core/test_faults.py`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from enginelink.block_keys import BlockScope, block_keys, scope_key
from openengine.v1 import error_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import generate_request
from worker.admin import Admin
from worker.commands import Command
from worker.control import Facts, Setup
from worker.copy_board import CopyBoard, CopyResult
from worker.core.tiers import CopyEnded, CopyWork, Tier
from worker.exits import ExitCode
from worker.intake import Intake
from worker.leader_engine import LeaderEngine
from worker.memory.device import DevicePool
from worker.memory.disk import Bytes, DiskFile, aligned
from worker.memory.host import HostPool
from worker.memory.layout import KvLayout
from worker.memory.mover import Mover
from worker.place import Place
from worker.refusal import Refused
from worker.service import Service
from worker.settings import WorkerSettings

CPU = torch.device("cpu")
LAYOUT = KvLayout(
    num_layers=1, num_kv_heads=1, head_dim=4, tokens_per_block=2, dtype="float32", head_start=0, head_stop=1
)
WAIT_S = 20.0
PAGES = 3


class StallingDisk(DiskFile):
    """Reads wait until `goes_on` is set."""

    goes_on: threading.Event

    def read(self, page: int, into: Bytes) -> None:
        assert self.goes_on.wait(WAIT_S)
        super().read(page, into)


class Rank:
    """One rank's tiers; `move` waits for what became of a copy."""

    def __init__(self, disk: DiskFile, deadline_s: float) -> None:
        self.device = DevicePool(LAYOUT, PAGES, CPU)
        self.disk = disk
        self.ended: queue.SimpleQueue[CopyEnded] = queue.SimpleQueue()
        self.mover = Mover(self.device, HostPool(LAYOUT, PAGES, CPU), disk, self.ended.put, deadline_s=deadline_s)
        self.device.tensor.copy_(torch.arange(self.device.tensor.numel()).view(self.device.tensor.shape))
        self.number = 0

    def move(self, source: Tier, target: Tier) -> CopyEnded:
        """All pages, each to the page of its own number."""
        self.number += 1
        pages = np.arange(PAGES, dtype=np.int32)
        self.mover.submit([CopyWork(self.number, source, target, pages, pages)])
        return self.ended.get(timeout=WAIT_S)


@contextmanager
def two_ranks(folder: Path, deadline_s: float = WAIT_S) -> Iterator[tuple[Rank, Rank]]:
    """The second one's disk stalls as long as its event is not set."""
    disks = DiskFile(folder, PAGES, LAYOUT.page_bytes), StallingDisk(folder, PAGES, LAYOUT.page_bytes)
    disks[1].goes_on = threading.Event()
    disks[1].goes_on.set()
    ranks = Rank(disks[0], deadline_s), Rank(disks[1], deadline_s)
    try:
        yield ranks
    finally:
        disks[1].goes_on.set()
        for rank in ranks:
            rank.mover.close()
            rank.disk.close()
            rank.device.close()


def agreed(board: CopyBoard, ranks: tuple[Rank, Rank], source: Tier, target: Tier) -> CopyResult:
    """What the group makes of a copy that each of them has been told to carry out."""
    pages = np.arange(PAGES, dtype=np.int32)
    board.began([CopyWork(ranks[0].number + 1, source, target, pages, pages)])
    board.feed(0, ranks[0].move(source, target))
    result = board.feed(1, ranks[1].move(source, target))
    assert result is not None
    return result


@pytest.mark.parametrize("fault", ["none", "a disk error", "a bad checksum", "a stalled read"])
def test_a_disk_error_a_bad_checksum_or_a_stalled_read_on_one_rank_alone_is_the_groups(
    tmp_path: Path, fault: str
) -> None:
    """The pages that every rank could read are the survivors: of a fault in the second page, the first one's."""
    with two_ranks(tmp_path, deadline_s=0.5 if fault == "a stalled read" else WAIT_S) as ranks:
        board = CopyBoard(2)
        assert agreed(board, ranks, Tier.DEVICE, Tier.DISK).good == PAGES
        expected = ranks[1].device.tensor.clone()
        ranks[1].device.tensor.zero_()
        broken = ranks[1].disk
        if fault == "a disk error":
            os.ftruncate(broken._fd, broken.stride)
        elif fault == "a bad checksum":
            other = aligned(broken.stride)
            other.fill(0xA5)
            os.pwrite(broken._fd, other.data, broken.stride)
        elif fault == "a stalled read":
            assert isinstance(broken, StallingDisk)
            broken.goes_on.clear()

        result = agreed(board, ranks, Tier.DISK, Tier.DEVICE)

        good = {"none": PAGES, "a stalled read": 0}.get(fault, 1)
        assert result.good == good
        assert [rank for rank, _ in result.failures] == ([] if fault == "none" else [1])
        assert torch.equal(ranks[1].device.tensor[:good], expected[:good])


def test_a_disk_that_takes_no_writes_on_one_rank_alone_keeps_nothing_on_any(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as ranks:
        full = ranks[1].disk
        read_only = os.open(f"/proc/self/fd/{full._fd}", os.O_RDONLY)
        os.dup2(read_only, full._fd)
        os.close(read_only)
        board = CopyBoard(2)

        result = agreed(board, ranks, Tier.DEVICE, Tier.DISK)

        assert (result.good, [rank for rank, _ in result.failures]) == (0, [1])
        assert "writing page 0: Bad file descriptor" in result.failures[0][1]
        assert agreed(board, ranks, Tier.DISK, Tier.DEVICE).good == 0


def test_a_read_that_was_given_up_writes_to_no_page_when_it_ends_after_all(tmp_path: Path) -> None:
    with two_ranks(tmp_path, deadline_s=0.3) as (_, rank):
        assert isinstance(rank.disk, StallingDisk)
        rank.move(Tier.DEVICE, Tier.DISK)
        rank.disk.goes_on.clear()
        assert rank.move(Tier.DISK, Tier.DEVICE).good == 0
        rank.device.tensor.fill_(7)

        rank.disk.goes_on.set()
        assert rank.move(Tier.DEVICE, Tier.HOST).good == PAGES

        assert torch.all(rank.device.tensor == 7)


def test_a_host_quota_from_local_free_memory_cannot_differ_between_ranks() -> None:
    """Each rank says what its share of the configured bytes holds; the least of each tier is everybody's."""
    facts = [Facts(max_pages=9, max_host_pages=2, max_disk_pages=7), Facts(5, 8, 7), Facts(6, 4, 3)]

    assert {Setup.agreed(order) for order in (facts, facts[::-1], facts[1:] + facts[:1])} == {Setup(5, 2, 3)}


def test_images_without_digests_do_not_match_each_other() -> None:
    """Two prompts of the same tokens around different images have no key in common, nor with one without images."""
    tokens = np.arange(8, dtype="<u4").tobytes()
    scopes = [BlockScope(multimodal=digests) for digests in ((), (b"one",), (b"two",), (b"one", b"two"), (b"onetwo",))]

    keys = [key for scope in scopes for key in block_keys(scope_key(scope), tokens, 2)]

    assert len(set(keys)) == len(keys) == 4 * len(scopes)


def test_a_request_with_an_image_is_refused_as_no_digest_of_it_would_be_in_its_keys() -> None:
    request = generate_request([1, 2, 3])
    request.media.add()

    with pytest.raises(Refused, match="media: this model reads text alone") as caught:
        Intake.require_supported(request)
    assert caught.value.code == error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE


class BrokenEngine(LeaderEngine):
    """Its thread dies as soon as it lives."""

    def _live(self) -> None:
        raise MemoryError("no page is left")


@pytest.mark.anyio
async def test_an_engine_thread_that_died_does_not_leave_health_green(tmp_path: Path) -> None:
    settings = WorkerSettings(model=make_tiny_model(tmp_path / "model"))
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    service = Service(settings, inbox.put)
    codes: list[ExitCode] = []

    def failed(why: str, code: ExitCode, recording: Path | None) -> None:
        codes.append(code)
        service.fail(why)

    place = Place(0, 0, 1, 1, master_addr="", master_port=0, control_port=0, token=b"t" * 16)
    engine = BrokenEngine(
        settings,
        place,
        inbox,
        service.metrics,
        service.instance_id,
        on_opened=lambda opened: None,
        on_step=lambda step: None,
        on_failed=failed,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Admin(service)), base_url="http://admin") as client:
        before = await client.get("/health")

        engine.run()

        assert (before.status_code, (await client.get("/health")).status_code) == (200, 503)
        assert (await client.get("/ready")).status_code == 503
    assert codes == [ExitCode.FAILED]
    assert service.requests.refusing == "rank 0 failed: MemoryError('no page is left')"
