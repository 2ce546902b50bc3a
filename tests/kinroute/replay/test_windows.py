from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kinroute.replay.lru import Recency
from kinroute.replay.segments import segments_of
from kinroute.replay.walk import Walk
from kinroute.replay.windows import Window, windowed
from tests.kinroute.replay.words import Words, load, words


def test_a_window_begins_with_the_cache_that_lru_had() -> None:
    turns = [Words(0, 1, "abcd"), Words(9, 1, "vwxy"), Words(18, 1, "ef"), Words(27, 1, "abcdz")]

    found = windowed(load(*turns), 8, window=2, role="context")

    # LRU gives up "cd" for "ef"; the optimum of the window keeps them.
    assert found == [Window(0, 2, 8, 0, 0), Window(2, 2, 7, 2, 4)]


@settings(max_examples=60, deadline=None)
@given(words(most=20), st.integers(1, 12), st.integers(1, 6))
def test_windows_cover_the_load_and_lru_is_never_above_the_optimum_of_one(
    requests: list[Words], spare: int, window: int
) -> None:
    asked = load(*requests)
    segments = segments_of(asked, role="context")
    endless = Walk(segments, 10**6, Recency(segments))
    endless.run()
    capacity = endless.most_held + len(requests) + spare
    lru = Walk(segments, capacity, Recency(segments))
    lru.run()

    found = windowed(asked, capacity, window=window, role="context")

    assert sum(one.requests for one in found) == len(asked)
    assert sum(one.lru_hits for one in found) == lru.hits.sum()
    assert all(one.lru_hits <= one.optimum_hits <= one.prompt_blocks for one in found)
