from __future__ import annotations

import itertools

from worker.core.conversations import StopReason
from worker.core.returns.classes import EVERYBODY, NUM_CLASSES, Children, Features, class_of, described, levels

EVERY = [
    Features(final, stop, is_child, turns, children, output, gap)
    for final, stop, is_child, turns, children, output, gap in itertools.product(
        (False, True), StopReason, (False, True), (1, 2, 5, 17), Children, (0, 150, 400), (None, 0, 3000, 12_000)
    )
]


def test_every_class_has_a_number_of_its_own_and_every_number_a_class() -> None:
    assert {class_of(features) for features in EVERY} == set(range(NUM_CLASSES))


def test_what_does_not_count_of_a_known_stop_reason_makes_no_class() -> None:
    first, last = Features(stop=StopReason.TOOL_CALL), Features(stop=StopReason.TOOL_CALL, output_tokens=9, gap_ms=9)

    assert class_of(first) == class_of(last)
    assert class_of(Features(gap_ms=9)) != class_of(Features())


def test_groups_end_where_they_say() -> None:
    numbers = [class_of(Features(turns=turns)) for turns in (1, 2, 4, 5, 16, 17, 99)]

    assert [described(number)["turns"] for number in numbers] == [
        "1 to 1", "2 to 4", "2 to 4", "5 to 16", "5 to 16", "17 or more", "17 or more",
    ]  # fmt: skip


def test_a_class_is_in_coarser_groups_that_it_shares_with_those_that_differ_later() -> None:
    one = levels(class_of(Features(stop=StopReason.END_OF_TURN, turns=3, children=Children.ENDED)))
    other = levels(class_of(Features(stop=StopReason.END_OF_TURN, turns=3, children=Children.NONE)))
    stranger = levels(class_of(Features(stop=StopReason.TOOL_CALL, turns=3, children=Children.ENDED)))

    assert one[:-2] == other[:-2]
    assert not set(one[-2:]) & set(other[-2:])
    assert not set(one) & set(stranger)


def test_no_two_groups_have_the_same_number() -> None:
    places: dict[int, set[tuple[int, int, int]]] = {}
    for number in range(NUM_CLASSES):
        for depth, level in enumerate(levels(number)):
            places.setdefault(level, set()).add((depth, levels(number)[0], len(levels(number))))
    assert all(len(found) == 1 for found in places.values())


def test_a_class_is_described_by_what_made_it() -> None:
    told = described(class_of(Features(True, StopReason.LENGTH, True, 20, Children.IN_FLIGHT)))

    assert told == {
        "final": "yes",
        "stop_reason": "length",
        "kind": "child",
        "turns": "17 or more",
        "children": "in flight",
        "output_tokens": "0 to 149",
    }
    assert described(EVERYBODY) == {}
