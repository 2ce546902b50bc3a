from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.core.stretches import Stretches

OWNERS = st.sampled_from(["", "a", "b"])


def build(owners: list[str]) -> Stretches:
    stretches = Stretches(owners[0])
    for block, owner in enumerate(owners[1:], start=1):
        stretches.extend(block, owner)
    return stretches


def spread(stretches: Stretches, length: int) -> list[str]:
    """Each block's owner."""
    return [owner for start, stop, owner in stretches.of_length(length) for _ in range(start, stop)]


@settings(max_examples=200, deadline=None)
@given(owners=st.lists(OWNERS, min_size=2, max_size=12), data=st.data())
def test_stretches_keep_each_blocks_owner_through_splits_and_trims(owners: list[str], data: st.DataObject) -> None:
    stretches = build(owners)
    cut = data.draw(st.integers(1, len(owners) - 1))

    rest = stretches.split(cut)

    assert spread(stretches, cut) == owners[:cut]
    assert spread(rest, len(owners) - cut) == owners[cut:]
    keep = data.draw(st.integers(1, cut))
    stretches.trim(keep)
    assert spread(stretches, keep) == owners[:keep]
    assert stretches.owners() == set(owners[:keep])


def test_neighbouring_blocks_of_one_owner_are_one_stretch() -> None:
    assert list(build(["a", "a", "b", "b", "a"]).of_length(5)) == [(0, 2, "a"), (2, 4, "b"), (4, 5, "a")]
