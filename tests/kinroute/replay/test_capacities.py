from __future__ import annotations

import random

import pytest

from kinroute.replay.capacities import TOLERANCE_POINTS, LruCurve, lru_needs, place
from kinroute.replay.ceiling import ceiling
from kinroute.replay.optimum import optimum
from kinroute.replay.segments import segments_of
from tests.kinroute.replay.words import Asked, Words, load


@pytest.fixture(scope="module")
def talks() -> list[Asked]:
    """Some conversations that each grow by a few blocks at a time."""
    draws = random.Random(1)
    said = ["".join(draws.choices("abcdefgh", k=6)) for _ in range(30)]
    requests: list[Words] = []
    for turn in range(600):
        one = draws.randrange(len(said))
        said[one] = said[one] + "".join(draws.choices("abcdefgh", k=3)) if len(said[one]) < 60 else said[one][:6]
        requests.append(Words(2 * turn, 3, said[one]))
    return load(*requests)


def test_lru_is_placed_so_many_points_under_the_ceiling(talks: list[Asked]) -> None:
    top = ceiling(talks, role="context", warmup=0.25)

    placed = place(talks, (5.0, 2.5, 1.0), role="context", warmup=0.25)

    for one in placed:
        below = 100 * (top.hit_blocks - one.hit_blocks) / top.prompt_blocks
        assert below == pytest.approx(one.points, abs=2 * TOLERANCE_POINTS)
    assert [one.capacity_blocks for one in placed] == sorted(one.capacity_blocks for one in placed)


def test_another_lru_may_be_asked(talks: list[Asked]) -> None:
    asked: list[int] = []
    curve = LruCurve(segments_of(talks, role="context"), 0.25)

    def twice_the_memory(capacity: int) -> int:
        asked.append(capacity)
        return curve.hits(2 * capacity)

    (mine,) = place(talks, [2.5], role="context", warmup=0.25)
    (other,) = place(talks, [2.5], role="context", warmup=0.25, run_lru=twice_the_memory)

    assert asked
    assert other.capacity_blocks == pytest.approx(mine.capacity_blocks / 2, rel=0.05)


def test_what_the_optimum_hits_costs_lru_more_memory_and_what_nobody_hits_no_memory_is_enough_for(
    talks: list[Asked],
) -> None:
    (half,) = place(talks, [2.5], role="context", warmup=0.25)
    best = optimum(talks, half.capacity_blocks, role="context", warmup=0.25)
    top = ceiling(talks, role="context", warmup=0.25)

    same, more, never = lru_needs(
        talks, [half.hit_blocks, best.hit_blocks, top.hit_blocks + 1], role="context", warmup=0.25
    )

    assert same is not None
    assert more is not None
    assert never is None
    assert same == pytest.approx(half.capacity_blocks, rel=0.01)
    assert more > 1.1 * same
