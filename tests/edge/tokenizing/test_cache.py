from __future__ import annotations

from edge.tokenizing.cache import ENTRY_BYTES, SegmentCache


def make_cache(entries: int) -> SegmentCache:
    """Room for about this many of the entries below."""
    return SegmentCache(entries * (ENTRY_BYTES + 100))


def test_the_entry_that_was_not_used_longest_goes_first() -> None:
    cache = make_cache(entries=2)
    cache.put(b"a", "one", b"1111")
    cache.put(b"a", "two", b"2222")
    assert cache.get(b"a", "one") == b"1111"

    cache.put(b"a", "six", b"6666")

    assert (cache.get(b"a", "one"), cache.get(b"a", "two"), cache.get(b"a", "six")) == (b"1111", None, b"6666")


def test_scopes_do_not_see_each_other() -> None:
    cache = make_cache(entries=2)

    cache.put(b"a", "one", b"1111")

    assert cache.get(b"b", "one") is None


def test_the_bound_counts_text_and_ids() -> None:
    cache = make_cache(entries=20)

    for at in range(100):
        cache.put(b"a", f"{at}" * 300, bytes(400))
        assert 0 < cache.used_bytes <= cache.max_bytes

    assert len(cache) < 20


def test_an_entry_larger_than_the_bound_leaves_the_others_alone() -> None:
    cache = make_cache(entries=2)
    cache.put(b"a", "one", b"1111")

    cache.put(b"a", "large", bytes(10_000))

    assert cache.get(b"a", "large") is None
    assert cache.get(b"a", "one") == b"1111"


def test_storing_again_costs_nothing() -> None:
    cache = make_cache(entries=2)
    cache.put(b"a", "one", b"1111")
    used = cache.used_bytes

    cache.put(b"a", "one", b"1111")

    assert (cache.used_bytes, len(cache)) == (used, 1)
