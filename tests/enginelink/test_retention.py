"""What a request may ask for its blocks: read, bounded by its tenant, refused by name where it is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from enginelink.retention import (
    DEFAULT_PRIORITY,
    MAX_DURATION_MS,
    Retention,
    RetentionBounds,
    RetentionError,
    TokenRange,
    read_retention,
    write_retention,
)

RANGES = "token_range_retention_configs"


def test_ranges_are_read_with_their_priorities_and_durations() -> None:
    asked = {
        RANGES: [
            {"token_start": 0, "token_end": 100, "priority": 80, "duration_ms": 5},
            {"token_start": 100, "token_end": None, "priority": 10.0},
        ],
        "decode_retention_priority": 20,
        "decode_duration_ms": 7,
    }

    assert read_retention(asked) == Retention((TokenRange(0, 100, 80, 5), TokenRange(100, None, 10)), 20, 7)


def test_the_simple_form_is_for_the_prompt_and_what_is_generated() -> None:
    assert read_retention({"priority": 5, "duration_ms": 9}) == Retention((TokenRange(0, None, 5, 9),), 5, 9)


def test_what_is_absent_or_null_is_the_default() -> None:
    nothing = {RANGES: None, "decode_retention_priority": None, "decode_duration_ms": None, "priority": None}

    assert read_retention({}) == read_retention(nothing) == Retention((), DEFAULT_PRIORITY, 0)


def test_what_is_written_is_read_again() -> None:
    retention = Retention((TokenRange(3, None, 80), TokenRange(0, 2, 0, 5)), 20, 7)

    assert read_retention(write_retention(retention)) == retention


@pytest.mark.parametrize(
    ("asked", "path", "told"),
    [
        (5, "", "an object, but got 5"),
        ("high", "", "an object, but got a string"),
        ({"prioritty": 5}, ".prioritty", "known are"),
        ({"priority": 101}, ".priority", "from 0 to 100, but got 101"),
        ({"priority": -1}, ".priority", "from 0 to 100, but got -1"),
        ({"priority": True}, ".priority", "got a boolean"),
        ({"priority": "high"}, ".priority", "got a string"),
        ({"priority": 1.5}, ".priority", "got 1.5"),
        ({"duration_ms": 5}, ".priority", "got null"),
        ({"priority": 5, "duration_ms": 0}, ".duration_ms", "from 1 to"),
        ({"priority": 5, "duration_ms": MAX_DURATION_MS + 1}, ".duration_ms", f"to {MAX_DURATION_MS}"),
        ({"priority": 5, RANGES: []}, f".{RANGES}", "for the whole request"),
        ({RANGES: {}}, f".{RANGES}", "an array, but got an object"),
        ({RANGES: [{"priority": 5}] * 65}, f".{RANGES}", "at most 64 ranges are allowed, but got 65"),
        ({RANGES: [{"priority": 5}, []]}, f".{RANGES}[1]", "an object, but got an array"),
        ({RANGES: [{"token_start": 0}]}, f".{RANGES}[0].priority", "got null"),
        ({RANGES: [{"token_start": -1, "priority": 5}]}, f".{RANGES}[0].token_start", "from 0 to"),
        ({RANGES: [{"token_start": 4, "token_end": 4, "priority": 5}]}, f".{RANGES}[0].token_end", "from 5 to"),
        ({RANGES: [{"priority": 5, "tier": 1}]}, f".{RANGES}[0].tier", "known are token_start"),
        ({"decode_retention_priority": 1000}, ".decode_retention_priority", "but got 1000"),
    ],
)
def test_a_wrong_member_is_refused_with_its_path_its_value_and_what_is_allowed(
    asked: Any, path: str, told: str
) -> None:
    with pytest.raises(RetentionError) as refused:
        read_retention(asked, "here")

    assert refused.value.path == f"here{path}"
    assert f"here{path}" in str(refused.value)
    assert told in str(refused.value)


def test_a_tenant_that_may_ask_for_no_more_than_the_default_can_lower_and_not_raise() -> None:
    asked = Retention((TokenRange(0, 8, 100, 5), TokenRange(8, None, 10)), decode_priority=36)

    clamped = RetentionBounds().clamp(asked)

    assert clamped == Retention((TokenRange(0, 8, 35), TokenRange(8, None, 10)), decode_priority=35)


def test_where_durations_are_bounded_nothing_above_the_default_holds_for_ever() -> None:
    bounds = RetentionBounds(max_priority=80, max_duration_ms=1000)
    asked = Retention((TokenRange(0, 8, 100), TokenRange(8, 9, 50, 5000), TokenRange(9, None, 10)), 36, 10)

    clamped = bounds.clamp(asked)

    assert [(one.priority, one.duration_ms) for one in clamped.ranges] == [(80, 1000), (50, 1000), (10, 0)]
    assert (clamped.decode_priority, clamped.decode_duration_ms) == (36, 10)
