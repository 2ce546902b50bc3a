"""Faults that other cache managers had, one test each; what needs real memory or processes is in
`tests/worker/test_cache_faults.py`."""

from __future__ import annotations

import pytest

from enginelink.block_keys import BlockKey, BlockScope, block_keys, scope_key
from tests.worker.core.engines import TestEngine, make_engine, make_request
from tests.worker.core.lineages import BOUND, LOW, Family
from tests.worker.core.trees import Tree
from worker.agreement import Agreement, Differs
from worker.core.config import CacheConfig
from worker.core.events import KEY_BYTES, CacheEvent, Cleared, Removed, Stored
from worker.core.outputs import Finished, HandoffReady, Started
from worker.core.paths import path_pages
from worker.core.plan import decode, encode
from worker.core.replica import Replica
from worker.core.stats import BELOW_THRESHOLD
from worker.core.tiers import Tier
from worker.core.types import DEFAULT_PRIORITY, Phase, RequestKey, Retention, TokenRange


def two_requests_under_pressure() -> TestEngine:
    engine = make_engine(num_pages=6, max_num_tokens=4, num_host_pages=8)
    for key in (1, 2, 3):
        engine.submit(key, [key] * 5, max_tokens=3)
    return engine


def test_a_per_rank_decision_ends_the_group_in_its_own_plan_and_hangs_nobody() -> None:
    """A rank that takes other pages than the others still computes the same tokens, so no collective waits for it."""
    sound, corrupt = Replica(CacheConfig(8, 2)), Replica(CacheConfig(8, 2))
    free = corrupt.cache.pools.free[Tier.DEVICE]
    free.give(free.take(2)[::-1])
    engine = make_engine()
    engine.submit(1, [1, 2, 3])
    made = engine.scheduler.plan(0)
    assert made is not None

    batches = [rank.apply(decode(encode(made[0]))).batch for rank in (sound, corrupt)]

    agreement = Agreement(2)
    assert agreement.feed(0, made[0].number, sound.digest) is None
    assert agreement.feed(1, made[0].number, corrupt.digest) == Differs(rank=1, number=1)
    assert all(batch is not None and batch.token_ids.tolist() == [1, 2, 3] for batch in batches)


def test_no_rank_local_free_count_gates_who_enters_a_forward() -> None:
    """Both ranks enter every forward with the same shapes, because the plan says so; none asks what it has free."""
    engine = two_requests_under_pressure()
    follower = Replica(engine.replica.config)
    forwards = 0
    while (made := engine.scheduler.plan(0)) is not None:
        plan, work = made
        theirs = follower.apply(decode(encode(plan))).batch
        assert (work.batch is None) == (theirs is None)
        if work.batch is not None and theirs is not None:
            forwards += 1
            assert work.batch.query_starts.tolist() == theirs.query_starts.tolist()
            assert work.batch.sample_requests == theirs.sample_requests
        engine.scheduler.complete(plan, engine.sampled(work))
        engine.end_copies()

    assert forwards > 3


def test_a_rank_with_fewer_free_pages_than_the_plan_needs_fails_instead_of_staying_out_of_the_collective() -> None:
    engine = two_requests_under_pressure()
    made = engine.scheduler.plan(0)
    assert made is not None
    poorer = Replica(engine.replica.config)
    assert poorer.cache.take(5) is not None

    with pytest.raises(AssertionError, match=r"rank 0 had pages for .* and this rank has not"):
        poorer.apply(decode(encode(made[0])))


@pytest.mark.parametrize("ends", ["released", "expired"])
def test_a_page_is_not_evicted_before_its_async_send_began_and_its_receiver_does_not_wait_for_ever(ends: str) -> None:
    """The survivors are the pinned pages, the oldest of all; everything younger leaves."""
    engine = make_engine(num_pages=6, handoff_timeout_ms=100)
    engine.submit(1, [1, 2, 3, 4], phase=Phase.CONTEXT, max_tokens=5)
    told = engine.run()
    assert any(isinstance(one, HandoffReady) for one in told)
    pinned = engine.works[-1].pins[0].pages.tolist()
    for key in (2, 3, 4):
        engine.submit(key, [key] * 8)
        assert Finished in {type(one) for one in engine.run()}
    written = {page for work in engine.works[1:] for page in work.written_pages(2).tolist()}
    assert written.isdisjoint(pinned)

    if ends == "released":
        engine.scheduler.released(RequestKey(1))
    engine.now_ms = 0 if ends == "released" else 100
    engine.step()

    assert engine.work.unpins == [1]
    assert engine.replica.cache.num_in_use == 0


def test_a_commit_does_not_evict_its_own_blocks() -> None:
    """With not a page to spare, each chunk's commit leaves the chunks before it where they are."""
    engine = make_engine(num_pages=4, max_num_tokens=2)
    engine.submit(1, [1, 1, 2, 2, 3, 3, 4, 4])

    engine.run()

    assert not any(one.act.startswith("evict") for one in engine.replica.decisions)
    engine.submit(2, [1, 1, 2, 2, 3, 3, 4, 4])
    assert Started(RequestKey(2), 6) in engine.run()


def test_a_live_requests_block_is_not_pruned() -> None:
    """Not by pressure, not by clearing, not by a demotion, a lapsing duration or a sibling that leaves."""
    tree = Tree(num_pages=6)
    live = tree.commit(1, 1, 2, 2, owner="child", worth=((0, LOW, 10),))
    tree.let_go(tree.commit(1, 1, 3, 3, owner="sibling"))
    tree.cache.plan_committed_retention("child").apply(0)
    tree.begin(now_ms=1_000)

    tree.cache.clear()
    tree.cache.clear(owners=("child", "sibling"))
    tree.evict(10)

    assert path_pages(live).tolist() == [0, 1]
    assert tree.cached(1, 1, 3, 3) == 1


def test_a_longer_sibling_does_not_lose_a_shorter_ones_endpoint() -> None:
    """Neither by its own end, nor by being dropped as the oldest: the shorter prompt is found whole afterwards."""
    tree = Tree()
    longer = tree.commit(1, 1, 2, 2, 3, 3, 4, 4, owner="longer")
    shorter = tree.hold(1, 1, 2, 2)
    tree.let_go(longer, shorter)
    tree.let_go(tree.commit(9, 9))
    tree.cache.plan_committed_retention("longer").apply(LOW)
    tree.let_go(tree.commit(1, 1, 2, 2, 5, 5, owner="shorter"))

    assert tree.evict(2) == [3, 2]

    assert tree.cached(1, 1, 2, 2, 5, 5) == 3
    assert tree.cached(9, 9) == 1


def test_a_priority_that_changes_while_its_page_is_queued_has_its_effect() -> None:
    """Both ways; without queueing anew the oldest would leave each time, which survives here."""
    tree = Tree()
    tree.let_go(tree.commit(9, 9), tree.commit(1, 1, owner="one"), tree.commit(2, 2, owner="two"))

    for child in ("one", "two"):
        tree.cache.plan_committed_retention(child).apply(LOW)
    tree.cache.restore("one")

    assert tree.evict(1) == [2]
    assert tree.evict(2) == [0, 1]


def test_popping_the_last_page_of_a_priority_does_not_break_the_next_eviction() -> None:
    tree = Tree(num_pages=8)
    tree.let_go(*(tree.commit(at, at, worth=((0, priority, 0),)) for at, priority in ((1, 50), (2, 10), (3, 20))))

    assert tree.evict(2) == [1, 2]
    tree.let_go(tree.commit(4, 4, worth=((0, 10, 0),)))
    assert tree.evict(1) == [3]
    assert tree.evict(5) == [0]
    assert tree.evict(1) == []


def test_a_partition_at_the_threshold_is_stable_and_keeps_the_pages_that_it_should() -> None:
    """Of children demoted at once the one let go first leaves first, whole, and the others keep their order too."""
    tree = Tree(num_pages=64, num_host_pages=64)
    tree.let_go(*(tree.commit(at, at, 50 + at, 50 + at, owner=f"child {at}") for at in range(1, 9)))
    for at in (2, 5, 7):
        tree.cache.plan_committed_retention(f"child {at}").apply(LOW)

    left = tree.evict(16)

    assert left == [3, 2, 9, 8, 13, 12, *(page for at in (1, 3, 4, 6, 8) for page in (2 * at - 1, 2 * at - 2))]
    assert tree.cache.stats.evicted_pages[BELOW_THRESHOLD] == 6
    assert tree.tree.num_idle[Tier.HOST] == 10


def test_held_low_priority_pages_are_not_dropped_by_the_threshold() -> None:
    """The survivor is held, of priority 0, and older than all that leaves in its place."""
    engine = make_engine(num_pages=6, num_host_pages=8)
    asked = Retention(ranges=(TokenRange(0, None, 0),), decode_priority=0)
    engine.submit(1, [1, 1, 2, 2], max_tokens=5, retention=asked)
    engine.step()
    engine.submit(2, [3, 3, 4, 4])
    engine.run()

    reader = make_request(3, [1, 1, 2, 2, 9], max_tokens=1)
    engine.scheduler.submit(reader)

    assert Started(RequestKey(3), 4) in engine.run()


@pytest.mark.parametrize(("priority", "survives"), [(80, True), (DEFAULT_PRIORITY, False)])
def test_a_retention_configuration_that_is_accepted_is_not_ignored(priority: int, survives: bool) -> None:
    """The same two prompts and the same pressure: the older one survives because, and only where, it was asked for."""
    engine = make_engine(num_pages=8)
    engine.submit(1, [1, 1, 2, 2, 0], retention=Retention(ranges=(TokenRange(0, None, priority),)))
    engine.run()
    engine.submit(2, [3, 3, 4, 4, 0])
    engine.run()
    engine.submit(3, [5] * 11)
    engine.run()
    engine.submit(4, [1, 1, 2, 2, 0])

    assert (Started(RequestKey(4), 4) in engine.run()) is survives


def test_events_never_carry_a_wrong_parent_hash() -> None:
    """Followed through commits, forks, moves and drops: each block is told behind the key that its prompt puts there,
    and where it still lies, whoever hears of it has heard of its parent."""
    engine = make_engine(num_pages=10, num_host_pages=6, num_disk_pages=6, tells_events=True, max_num_tokens=6)
    prompts = [[1, 1, 2, 2, 3, 3, 0], [1, 1, 2, 2, 4, 4, 5, 5, 0], [1, 1, 6, 6, 7, 7, 0], [8] * 13]
    scope = scope_key(BlockScope())
    follower: dict[bytes, set[Tier]] = {}
    told = 0
    for round_number in range(4):
        for at, prompt in enumerate(prompts):
            engine.submit(10 * round_number + at + 1, prompt, max_tokens=4)
            while engine.step() is not None:
                engine.end_copies()
                told += follow(follower, engine.work.events, scope)

    assert told > 30
    resident = {
        run.key(block): {run.tier_of(block)}
        for run in engine.replica.cache.tree.runs()
        if run.parent is not None
        for block in range(run.length)
    }
    assert follower == resident


def follow(known: dict[bytes, set[Tier]], events: list[CacheEvent], scope: BlockKey) -> int:
    """Keep `known` as these events tell; returns how many blocks were stored."""
    stored = 0
    for event in events:
        match event:
            case Stored():
                assert (event.parent == scope) is event.begins
                assert event.begins or event.parent in known, "a block behind one that nobody was told of"
                keys = block_keys(BlockKey(event.parent), event.token_ids.tobytes(), 2)
                assert event.keys == b"".join(keys), "keys that are not their tokens'"
                for key in keys:
                    known.setdefault(key, set()).add(event.tier)
                stored += len(keys)
            case Removed():
                for start in range(0, len(event.keys), KEY_BYTES):
                    left = event.keys[start : start + KEY_BYTES]
                    known[left].remove(event.tier)
                    if not known[left]:
                        del known[left]
            case Cleared():
                known.clear()
    return stored


@pytest.mark.parametrize("host", [0, 1])
def test_a_pool_with_one_page_does_not_deadlock(host: int) -> None:
    engine = make_engine(num_pages=1, num_host_pages=host, tokens_per_block=4)
    for key in range(1, 5):
        engine.submit(key, [key % 2] * 3, max_tokens=2)
    told = engine.run()
    while engine.end_copies():
        told += engine.run()

    assert sorted(one.key for one in told if isinstance(one, Finished)) == [1, 2, 3, 4]
    assert engine.replica.cache.num_available == 1


def test_what_goes_goes_through_the_policy_and_not_through_ordinary_pressure() -> None:
    """The pair that every test of an eviction is: the same prompts, plans and pressure, with and without a policy."""
    gone: dict[int | None, tuple[bool, bool]] = {}
    for priority in (None, LOW):
        family = Family(priority=priority)
        family.ask("survivor", 9, 9, 0)
        family.ask("child", 3, 3, 0, parent="parent")
        family.pass_plans_until_idle("child", BOUND)
        family.ask("parent", 7, 7, 0)
        family.press(1)
        gone[priority] = (not family.cached(9, 9), not family.cached(3, 3))

    assert gone == {None: (True, False), LOW: (False, True)}
