"""Pages pulled between groups of any two sizes, out of another process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.worker.memory.transfer.samples import (
    HELD,
    HELD_TOKENS,
    Ending,
    empty_pool,
    layouts,
    make_ref,
    numbers,
    whole_pages,
)
from tests.worker.memory.transfer.source import Source
from worker.memory.layout import KvLayout
from worker.memory.transfer.client import PullResult, TransferClient

LOOPBACK = ("127.0.0.0/8",)
KV_HEADS = (3, 4)
Ranks = list[tuple[str, KvLayout]]
SESSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    """The ranks of groups of every size, in one process."""
    groups = [layouts(kv_heads, world_size) for kv_heads in KV_HEADS for world_size in range(1, 4)]
    with Source([layout for group in groups for layout in group]) as source:
        yield source


def group_of(source: Source, kv_heads: int, world_size: int) -> Ranks:
    wanted = layouts(kv_heads, world_size)
    starts = [at for at in range(len(source.layouts)) if source.layouts[at : at + world_size] == wanted]
    return source.ranks[starts[-1] : starts[-1] + world_size]


def pull(
    client: TransferClient, source: Source, ranks: Ranks, *, shared: bool, first_block: int, pages: list[int]
) -> PullResult:
    """Pin a new session and pull these blocks of it."""
    session_id = f"{next(SESSIONS):032x}"
    source.pin(HELD, HELD_TOKENS, session_id)
    ref = make_ref(ranks[0][1], ranks, host_key=source.host_key if shared else "", session_id=session_id)
    ending = Ending()
    client.pull(ref, first_block, np.array(pages, np.int32), ending)
    result = ending.wait()
    source.unpin(session_id)
    return result


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
@pytest.mark.parametrize(
    ("kv_heads", "context_ranks", "generation_ranks"),
    [(3, 1, 1), (3, 2, 1), (3, 1, 2), (3, 2, 2), (3, 3, 2), (3, 2, 3), (4, 2, 1), (4, 1, 2), (4, 3, 2), (4, 2, 4)],
)
def test_each_rank_gets_its_heads_of_every_page_and_nothing_else_changes(
    source: Source, kv_heads: int, context_ranks: int, generation_ranks: int, shared: bool
) -> None:
    ranks = group_of(source, kv_heads, context_ranks)
    targets = [9, 0, 1, 2, 23]
    session_id = f"{next(SESSIONS):032x}"
    source.pin(HELD, HELD_TOKENS, session_id)
    ref = make_ref(ranks[0][1], ranks, host_key=source.host_key if shared else "", session_id=session_id)

    for layout in layouts(kv_heads, generation_ranks):
        pool = empty_pool(layout)
        client = TransferClient(pool, layout, LOOPBACK, timeout_s=20.0)
        ending = Ending()
        client.pull(ref, 2, np.array(targets, np.int32), ending)
        result = ending.wait()
        client.close()

        expected = np.zeros_like(numbers(pool))
        heads = slice(layout.head_start, layout.head_stop)
        expected[targets] = whole_pages(kv_heads)[HELD[2:].astype(np.int64), :, :, heads].numpy()
        assert result == PullResult(
            None,
            shared_bytes=expected[targets].nbytes if shared else 0,
            tcp_bytes=0 if shared else expected[targets].nbytes,
        )
        assert np.array_equal(numbers(pool), expected)
    source.unpin(session_id)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_many_pulls_at_once_and_one_after_the_other_keep_apart(source: Source, shared: bool) -> None:
    ranks = group_of(source, 3, 2)
    (layout,) = layouts(3, 1)
    pool = empty_pool(layout)
    client = TransferClient(pool, layout, LOOPBACK, timeout_s=20.0)
    session_ids = [f"{next(SESSIONS):032x}" for _ in range(8)]
    for session_id in session_ids:
        source.pin(HELD, HELD_TOKENS, session_id)

    for part in (session_ids[:1], session_ids[1:]):
        endings = []
        for at, session_id in enumerate(part):
            ref = make_ref(layout, ranks, host_key=source.host_key if shared else "", session_id=session_id)
            endings.append(Ending())
            client.pull(ref, 4, np.array([3 * at, 3 * at + 2, 3 * at + 1], np.int32), endings[-1])
        assert [ending.wait().why for ending in endings] == [None] * len(part)

    assert client.num_pulls == 0
    client.close()
    expected = whole_pages(3)[HELD[4:].astype(np.int64)].numpy()
    for at in range(len(session_ids) - 1):
        assert np.array_equal(numbers(pool)[[3 * at, 3 * at + 2, 3 * at + 1]], expected)


def test_a_source_of_another_host_key_is_reached_over_tcp(source: Source) -> None:
    ranks = group_of(source, 3, 1)
    (layout,) = layouts(3, 1)
    client = TransferClient(empty_pool(layout), layout, LOOPBACK, timeout_s=20.0)
    session_id = f"{next(SESSIONS):032x}"
    source.pin(HELD, HELD_TOKENS, session_id)
    ending = Ending()

    client.pull(make_ref(layout, ranks, host_key="another", session_id=session_id), 6, np.array([0], np.int32), ending)

    result = ending.wait()
    client.close()
    assert (result.why, result.shared_bytes, result.tcp_bytes) == (None, 0, layout.page_bytes)


def test_a_sources_memory_is_mapped_once_and_read_only_and_let_go_of_when_the_source_ends() -> None:
    (layout,) = layouts(3, 1)
    client = TransferClient(empty_pool(layout), layout, LOOPBACK, timeout_s=20.0)
    own = len(mappings())
    with Source([layout]) as source:
        for _ in range(3):
            assert pull(client, source, source.ranks, shared=True, first_block=0, pages=[1]).why is None
        assert len(mappings()) == own + 1
        assert sum(" r--s " in line for line in mappings()) == 1

    ending = Ending()
    client.pull(make_ref(layout, source.ranks), 0, np.array([1], np.int32), ending)
    assert "Connect call failed" in (ending.wait().why or "")
    assert len(mappings()) == own
    client.close()


def mappings() -> list[str]:
    """This process's mappings of pools."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "kinroute-pages" in line]
