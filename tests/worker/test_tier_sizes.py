"""Every rank gets the same pages of every tier, whatever its own share would hold."""

from __future__ import annotations

import pytest
import torch

from configuration.reading import SettingsError
from worker.control import Facts, Setup
from worker.kv_settings import KvCacheConfig
from worker.loading import facts_of
from worker.memory.layout import KvLayout

PAGE_BYTES_OF_A_HEAD = 2 * 2 * 8 * 4 * 4
CPU = torch.device("cpu")


def layout(heads: int) -> KvLayout:
    return KvLayout(2, 4, 8, 4, "float32", head_start=0, head_stop=heads)


def config(host: int = 0, disk: int = 0) -> KvCacheConfig:
    return KvCacheConfig(max_tokens=64, host_cache_size=host, disk_cache_size=disk, tokens_per_block=4)


def test_a_tiers_bytes_are_shared_by_the_ranks() -> None:
    ten_pages = 10 * PAGE_BYTES_OF_A_HEAD

    facts = facts_of(config(host=2 * ten_pages, disk=6 * ten_pages + 1), layout(1), CPU, world_size=2)

    assert facts == Facts(max_pages=16, max_host_pages=10, max_disk_pages=30)


def test_the_rank_with_the_largest_pages_decides_for_all() -> None:
    wanted = config(host=3 * 8 * PAGE_BYTES_OF_A_HEAD)

    facts = [facts_of(wanted, layout(heads), CPU, world_size=3) for heads in (1, 1, 2)]

    assert [fact.max_host_pages for fact in facts] == [8, 8, 4]
    assert Setup.agreed(facts) == Setup(num_pages=16, num_host_pages=4, num_disk_pages=0)


def test_each_tier_takes_its_own_least() -> None:
    facts = [Facts(9, 2, 7), Facts(5, 8, 7), Facts(6, 4, 3)]

    assert Setup.agreed(facts) == Setup(num_pages=5, num_host_pages=2, num_disk_pages=3)


@pytest.mark.parametrize(("host", "disk", "key"), [(100, 0, "host_cache_size"), (0, 100, "disk_cache_size")])
def test_a_tier_that_cannot_hold_a_page_of_every_rank_is_refused(host: int, disk: int, key: str) -> None:
    least = 2 * PAGE_BYTES_OF_A_HEAD

    with pytest.raises(
        SettingsError, match=f"kv_cache_config.{key} is 100: less than one page .* at least {least}, or"
    ):
        facts_of(config(host, disk), layout(1), CPU, world_size=2)


def test_no_tier_is_sized_by_what_is_free() -> None:
    petabyte = 1 << 50

    facts = facts_of(config(host=petabyte, disk=petabyte), layout(1), CPU, world_size=1)

    assert facts.max_host_pages == facts.max_disk_pages == petabyte // PAGE_BYTES_OF_A_HEAD
