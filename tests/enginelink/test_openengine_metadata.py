"""OpenEngine's metadata keys are read by the protocol's rules."""

from __future__ import annotations

import pytest

from enginelink.openengine_metadata import MetadataError, RequestMetadata, read_metadata


def test_all_three_keys_are_read_and_others_left_alone() -> None:
    pairs = [
        ("openengine-routing-key", "any bytes"),
        ("openengine-target-dp-rank", "4294967295"),
        ("openengine-priority", "-2147483648"),
        ("openengine-later", "x"),
        ("authorization", "a"),
        ("authorization", "b"),
    ]

    assert read_metadata(pairs) == RequestMetadata("any bytes", 2**32 - 1, -(2**31))
    assert read_metadata([]) == RequestMetadata("", None, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("openengine-routing-key", ""),
        ("openengine-routing-key", "x" * 257),
        ("openengine-target-dp-rank", "-1"),
        ("openengine-target-dp-rank", "4294967296"),
        ("openengine-target-dp-rank", "0x1"),
        ("openengine-target-dp-rank", "9" * 5000),
        ("openengine-priority", "2147483648"),
        ("openengine-priority", "high"),
        ("openengine-priority", "--1"),
        ("openengine-priority", ""),
        ("openengine-priority", "\u0661"),
    ],
)
def test_what_is_malformed_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(MetadataError, match=key):
        read_metadata([(key, value)])


def test_a_key_that_is_given_twice_is_refused_even_an_unknown_one() -> None:
    with pytest.raises(MetadataError, match="openengine-later is given twice"):
        read_metadata([("openengine-later", "x"), ("openengine-later", "x")])
