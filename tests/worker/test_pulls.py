"""A pull is over when its last rank is, even after another has failed."""

from __future__ import annotations

from worker.core.types import RequestKey
from worker.pulls import PullBoard

ONE = RequestKey(1)


def test_a_pull_has_arrived_once_every_rank_has_its_pages() -> None:
    board = PullBoard(2)

    assert board.feed(0, ONE, None) is None
    assert board.feed(1, ONE, None) == (None,)


def test_a_failure_waits_for_the_ranks_that_still_write() -> None:
    board = PullBoard(2)

    assert board.feed(1, ONE, "refused") is None
    assert board.feed(0, ONE, None) == ("rank 1: refused",)


def test_nothing_is_kept_of_a_pull_that_is_over() -> None:
    board = PullBoard(1)

    board.feed(0, ONE, None)

    assert len(board) == 0
