from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.core.stretches import Change, Stretches, Terms

TERMS = st.builds(Terms, st.sampled_from(["", "a", "b"]), st.sampled_from([1, 35, 80]))


def build(terms: list[Terms]) -> Stretches:
    stretches = Stretches(terms[0])
    for block, one in enumerate(terms[1:], start=1):
        stretches.extend(block, one)
    return stretches


def of(*owners: str) -> list[Terms]:
    return [Terms(owner) for owner in owners]


def spread(stretches: Stretches, length: int) -> list[Terms]:
    """Each block's terms."""
    return [terms for start, stop, terms in stretches.of_length(length) for _ in range(start, stop)]


@settings(max_examples=200, deadline=None)
@given(terms=st.lists(TERMS, min_size=2, max_size=12), data=st.data())
def test_stretches_keep_each_blocks_terms_through_splits_and_trims(terms: list[Terms], data: st.DataObject) -> None:
    stretches = build(terms)
    cut = data.draw(st.integers(1, len(terms) - 1))

    rest = stretches.split(cut)

    assert spread(stretches, cut) == terms[:cut]
    assert spread(rest, len(terms) - cut) == terms[cut:]
    keep = data.draw(st.integers(1, cut))
    stretches.trim(keep)
    assert spread(stretches, keep) == terms[:keep]
    assert stretches.owners() == {one.owner for one in terms[:keep]}


@settings(max_examples=200, deadline=None)
@given(terms=st.lists(TERMS, min_size=1, max_size=12), data=st.data())
def test_a_change_reaches_the_blocks_from_its_start_on_and_no_others(terms: list[Terms], data: st.DataObject) -> None:
    stretches = build(terms)
    start = data.draw(st.integers(0, len(terms)))

    changes = stretches.change(start, len(terms), lambda one: one._replace(priority=1) if one.owner == "a" else one)

    expected = [
        one._replace(priority=1) if block >= start and one.owner == "a" else one for block, one in enumerate(terms)
    ]
    assert spread(stretches, len(terms)) == expected
    assert stretches.is_merged()
    told = {block: change.new for change in changes for block in range(change.start, change.stop)}
    assert told == {block: new for block, (old, new) in enumerate(zip(terms, expected, strict=True)) if old != new}


@settings(max_examples=200, deadline=None)
@given(terms=st.lists(TERMS, min_size=1, max_size=12), data=st.data())
def test_stretches_know_the_highest_priority_behind_a_block_and_how_far_up_it_reaches(
    terms: list[Terms], data: st.DataObject
) -> None:
    stretches = build(terms)
    block = data.draw(st.integers(0, len(terms) - 1))
    priorities = [one.priority for one in terms]

    assert stretches.top(block) == max(priorities[block:])
    first = stretches.first_within(block + 1, 35)
    assert all(priority <= 35 for priority in priorities[first : block + 1])
    assert first == 0 or priorities[first - 1] > 35


def test_neighbouring_blocks_on_the_same_terms_are_one_stretch() -> None:
    assert list(build(of("a", "a", "b", "b", "a")).of_length(5)) == [
        (0, 2, Terms("a")),
        (2, 4, Terms("b")),
        (4, 5, Terms("a")),
    ]


def test_a_change_tells_the_old_and_the_new_terms() -> None:
    stretches = build(of("a", "a", "b"))

    assert stretches.change(1, 3, lambda terms: terms._replace(priority=9)) == [
        Change(1, 2, Terms("a"), Terms("a", 9)),
        Change(2, 3, Terms("b"), Terms("b", 9)),
    ]
