from __future__ import annotations

import numpy as np
import pytest

from worker.copy_board import CopyBoard, CopyResult
from worker.core.tiers import CopyEnded, CopyWork, Tier


def copy(number: int, pages: int = 3, source: Tier = Tier.HOST, target: Tier = Tier.DISK) -> CopyWork:
    return CopyWork(number, source, target, np.arange(pages, dtype=np.int32), np.arange(pages, dtype=np.int32))


def test_a_copy_is_over_once_every_rank_is_done_with_it() -> None:
    board = CopyBoard(2)
    board.began([copy(1)])

    assert board.feed(1, CopyEnded(1, 3)) is None
    assert board.feed(0, CopyEnded(1, 3)) == CopyResult(1, 3, Tier.DISK)
    assert len(board) == 0


def test_the_pages_that_arrived_are_those_that_arrived_everywhere_and_who_lacks_some_is_named() -> None:
    board = CopyBoard(3)
    board.began([copy(1)])
    board.feed(0, CopyEnded(1, 3))
    board.feed(2, CopyEnded(1, 1, "checksum"))

    assert board.feed(1, CopyEnded(1, 2, "I/O")) == CopyResult(
        1, 1, Tier.DISK, ((2, "checksum"), (1, "I/O")), off=False
    )


def test_three_failures_of_a_tier_on_one_rank_switch_it_off_once() -> None:
    board = CopyBoard(2)
    off = []
    for number in range(1, 6):
        board.began([copy(number)])
        board.feed(0, CopyEnded(number, 3))
        result = board.feed(1, CopyEnded(number, 0, "I/O"))
        assert result is not None
        off.append(result.off)

    assert off == [False, False, True, False, False]


def test_failures_of_different_ranks_or_tiers_do_not_add_up() -> None:
    board = CopyBoard(2)
    for number, (rank, source) in enumerate([(0, Tier.DISK), (1, Tier.DISK), (0, Tier.HOST), (1, Tier.HOST)] * 2):
        board.began([copy(number, source=source, target=Tier.DEVICE)])
        board.feed(1 - rank, CopyEnded(number, 3))
        result = board.feed(rank, CopyEnded(number, 0, "I/O"))
        assert result is not None
        assert not result.off


def test_a_report_of_a_copy_that_does_not_run_is_refused() -> None:
    board = CopyBoard(2)
    board.began([copy(1)])
    board.feed(0, CopyEnded(1, 3))

    with pytest.raises(ValueError, match="rank 0 reports copy 1"):
        board.feed(0, CopyEnded(1, 3))
    with pytest.raises(ValueError, match="copy 2"):
        board.feed(1, CopyEnded(2, 3))
