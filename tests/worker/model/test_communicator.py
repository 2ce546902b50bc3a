from __future__ import annotations

import random
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.model.ranks import SLOT_BYTES, Join, RankGroup, join_gloo, join_shared_memory, rank_group
from worker.model.communicator import Communicator, CommunicatorTimeout, SoloCommunicator
from worker.model.shared_memory import SharedMemoryCommunicator

KINDS: list[tuple[Join, int]] = [(join_shared_memory, 2), (join_shared_memory, 3), (join_gloo, 2), (join_gloo, 3)]
State = dict[str, Any]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    join, world_size = request.param
    with rank_group(world_size, join) as ranks:
        yield ranks


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).to(dtype)


def add_up(communicator: Communicator, _: State, count: int, dtype: torch.dtype) -> Tensor:
    mine = numbers(communicator.rank, count, dtype)
    communicator.all_reduce(mine)
    return mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 577, SLOT_BYTES], ids=lambda count: f"{count}-numbers")
def test_every_rank_gets_the_same_bits_of_the_sum(group: RankGroup, count: int, dtype: torch.dtype) -> None:
    sums = group.call(add_up, count, dtype)

    expected = sum(numbers(rank, count, dtype).float() for rank in range(group.world_size))
    torch.testing.assert_close(sums[0].float(), expected, atol=1e-6 if dtype == torch.float32 else 0.02, rtol=1e-2)
    for other in sums[1:]:
        assert torch.equal(sums[0], other)


def add_small_to_large(communicator: Communicator, _: State) -> list[float]:
    """In each place another rank has the large number, so that no order of adding is kind to all of them."""
    mine = torch.ones(3, dtype=torch.bfloat16)
    mine[communicator.rank] = 256.0
    communicator.all_reduce(mine)
    sums: list[float] = mine.tolist()
    return sums


def test_bfloat16_is_accumulated_as_float32(group: RankGroup) -> None:
    # In bfloat16, 256 + 1 is 256.
    expected = [256.0, 256.0, 2.0] if group.world_size == 2 else [258.0] * 3

    assert group.call(add_small_to_large) == [expected] * group.world_size


def add_up_in_two_dimensions(communicator: Communicator, _: State) -> list[list[float]]:
    mine = torch.full((1, 2, 3), float(communicator.rank + 1))
    communicator.all_reduce(mine)
    rows: list[list[float]] = mine[0].tolist()
    return rows


def test_a_tensor_keeps_its_shape(group: RankGroup) -> None:
    total = float(sum(range(1, group.world_size + 1)))

    assert group.call(add_up_in_two_dimensions)[0] == [[total] * 3] * 2


def collect(communicator: Communicator, _: State, rows: int, widths: list[int]) -> list[Tensor] | None:
    width = widths[communicator.rank]
    mine = torch.arange(rows * width, dtype=torch.float32).view(rows, width) + 1_000_000 * communicator.rank
    return communicator.gather(mine, widths)


@pytest.mark.parametrize("rows", [1, 7])
def test_rank_0_gathers_parts_of_different_widths(group: RankGroup, rows: int) -> None:
    widths = [SLOT_BYTES, 999, 1][: group.world_size]

    parts, *others = group.call(collect, rows, widths)

    assert others == [None] * (group.world_size - 1)
    for rank, (part, width) in enumerate(zip(parts, widths, strict=True)):
        assert torch.equal(part, torch.arange(rows * width).view(rows, width) + 1_000_000.0 * rank)


def hear(communicator: Communicator, _: State, count: int) -> Tensor:
    mine = numbers(communicator.rank, count, torch.float32)
    communicator.broadcast(mine)
    return mine


@pytest.mark.parametrize("count", [3, SLOT_BYTES])
def test_everybody_hears_rank_0(group: RankGroup, count: int) -> None:
    for heard in group.call(hear, count):
        assert torch.equal(heard, numbers(0, count, torch.float32))


def add_up_at_its_own_pace(communicator: Communicator, _: State, rounds: int) -> list[float]:
    rng = random.Random(communicator.rank)
    sums = []
    for number in range(rounds):
        if rng.random() < 0.02:
            time.sleep(rng.random() * 0.004)
        mine = torch.tensor([float(number * (communicator.rank + 1))])
        communicator.all_reduce(mine)
        sums.append(float(mine))
    return sums


def test_ranks_of_different_pace_stay_in_step(group: RankGroup) -> None:
    share = sum(range(1, group.world_size + 1))

    for sums in group.call(add_up_at_its_own_pace, 1000):
        assert sums == [number * share for number in range(1000)]


def expect_silence(communicator: Communicator, _: State) -> str:
    try:
        communicator.all_reduce(torch.zeros(1))
    except CommunicatorTimeout as error:
        return str(error)
    return "no error"


def join_impatiently(meeting: Path, rank: int, world_size: int) -> Communicator:
    return SharedMemoryCommunicator(meeting, rank, world_size, deadline_s=0.2)


def nothing(*_: object) -> None:
    return


def test_a_peer_that_died_is_named_after_the_deadline() -> None:
    with rank_group(2, join_impatiently) as group:
        group.call(nothing)
        group.kill(1)
        group.begin(0, expect_silence)

        assert group.end(0) == "rank 1 did not enter collective 2 in 0.2 s"


def test_a_gloo_peer_that_died_ends_the_collective() -> None:
    with rank_group(2, join_gloo) as group:
        group.call(nothing)
        group.kill(1)
        group.begin(0, expect_silence)

        assert re.match("all_reduce: ", group.end(0))


def test_a_meeting_nobody_else_comes_to_ends(tmp_path: Path) -> None:
    with pytest.raises(CommunicatorTimeout, match="rank 1"):
        SharedMemoryCommunicator(tmp_path / "meeting", 0, 3, meeting_s=0.05)


def test_the_meeting_file_is_private_and_goes_when_all_have_come(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    first = threading.Thread(target=SharedMemoryCommunicator, args=(meeting, 0, 2), kwargs={"slot_bytes": 64})
    first.start()
    deadline_s = time.monotonic() + 10
    while not meeting.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert stat.S_IMODE(meeting.stat().st_mode) == 0o600

    SharedMemoryCommunicator(meeting, 1, 2, slot_bytes=64)
    first.join(10)

    assert not first.is_alive()
    assert not meeting.exists()


def test_a_group_of_one_keeps_what_it_has() -> None:
    solo, mine = SoloCommunicator(), torch.tensor([[1.0, 2.0]])
    solo.all_reduce(mine)
    solo.broadcast(mine)

    parts = solo.gather(mine, [2])

    assert parts is not None
    assert torch.equal(parts[0], torch.tensor([[1.0, 2.0]]))
