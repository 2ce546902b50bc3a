from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.shards import Overlap, kv_head_ranges, overlaps


@given(heads=st.integers(1, 64), data=st.data())
def test_every_head_belongs_to_one_rank_and_no_rank_has_two_more_than_another(heads: int, data: st.DataObject) -> None:
    ranges = kv_head_ranges(heads, data.draw(st.integers(1, heads)))

    assert [head for start, stop in ranges for head in range(start, stop)] == list(range(heads))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [0, 4])
def test_more_ranks_than_kv_heads_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="3 KV heads"):
        kv_head_ranges(3, world_size)


@given(heads=st.integers(1, 32), data=st.data())
def test_a_rank_finds_each_of_its_heads_once_at_a_rank_that_holds_it(heads: int, data: st.DataObject) -> None:
    sources = kv_head_ranges(heads, data.draw(st.integers(1, heads)))
    for wanted in kv_head_ranges(heads, data.draw(st.integers(1, heads))):
        found = overlaps(sources, wanted)

        assert [head for one in found for head in range(one.head_start, one.head_stop)] == list(range(*wanted))
        for one in found:
            start, stop = sources[one.rank]
            assert start <= one.head_start < one.head_stop <= stop


def test_heads_of_an_uneven_group_come_from_both_of_its_ranks() -> None:
    assert overlaps([(0, 2), (2, 3)], (1, 3)) == [Overlap(0, 1, 2), Overlap(1, 2, 3)]
