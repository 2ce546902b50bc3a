from __future__ import annotations

import numpy as np
import pytest

from worker.core.cache import KvCache
from worker.core.config import CacheConfig
from worker.core.journal import Journal
from worker.core.pages import FreePages


def test_pages_are_taken_in_order_and_the_ones_given_back_come_first() -> None:
    free = FreePages(6)
    assert free.take(4).tolist() == [0, 1, 2, 3]

    free.give(np.array([2, 0], np.int32))

    assert free.take(3).tolist() == [2, 0, 4]
    assert len(free) == 1


def test_more_pages_than_there_are_cannot_be_given_back() -> None:
    free = FreePages(2)

    with pytest.raises(AssertionError, match="more pages given back"):
        free.give(np.array([0], np.int32))


def test_pages_are_taken_all_or_none_and_a_refusal_changes_nothing() -> None:
    cache = KvCache(CacheConfig(num_pages=4, tokens_per_block=2), Journal())

    assert cache.take(5) is None

    assert cache.num_available == 4
    taken = cache.take(4)
    assert taken is not None
    assert taken.tolist() == [0, 1, 2, 3]
    assert cache.take(1) is None
