from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kinroute.replay.arm import CONTEXT_LEG_S, STEP_MS
from kinroute.replay.lru import Recency
from kinroute.replay.optimum import Bound, NextUse, counted, optimum, optimum_of
from kinroute.replay.schedule import as_they_come
from kinroute.replay.segments import Role, segments_of
from kinroute.replay.walk import Walk
from tests.kinroute.replay.words import Words, load, words

Cache: TypeAlias = frozenset[str]


def best_of_all(requests: list[Words], capacity: int, role: Role, counted_from: int = 0) -> int | None:
    """The most hits of requests from `counted_from` on that any sequence of legal evictions reaches: all are tried.

    Legal: in the plan in which they come, requests hold all of their blocks, old and new, until that in which they are
    over and their answers are kept. At the end of a plan as many idle blocks leave as there are too many, none before
    what hangs below it. Nobody waits. A hit is a block that is there when the request comes, or that another needs that
    came before, the last block of a prompt excepted.
    None: they hold more than there are places.
    """
    states: dict[Cache, int] = {frozenset(): 0}
    leg = math.ceil(CONTEXT_LEG_S * 1000 / STEP_MS)
    overs = [one.plan + (leg if role == "context" else max(1, one.plans)) for one in requests]
    running: list[int] = []
    for plan in range(max(overs) + 1):
        for number in sorted(running, key=lambda number: (overs[number], number)):
            if overs[number] == plan:
                answer = set(path(requests[number], requests[number].answer if role == "aggregated" else ""))
                states = {cache | answer: hits for cache, hits in states.items()}
                running.remove(number)
        for number, one in enumerate(requests):
            if one.plan == plan:
                running.append(number)
                states = asked(states, one, counts=number >= counted_from)
        states = roomy(states, {word for one in running for word in path(requests[one])}, capacity)
    return max(states.values(), default=None)


def path(one: Words, answer: str = "") -> list[str]:
    word = one.prompt + answer
    return [word[: at + 1] for at in range(len(word))]


def asked(states: dict[Cache, int], one: Words, *, counts: bool) -> dict[Cache, int]:
    """It has come in each of these caches, which may be too full now."""
    after: dict[Cache, int] = {}
    for cache, hits in states.items():
        found = len(list(itertools.takewhile(cache.__contains__, path(one)[:-1])))
        grown = cache | set(path(one))
        after[grown] = max(after.get(grown, 0), hits + found * counts)
    return after


def roomy(states: dict[Cache, int], held: set[str], capacity: int) -> dict[Cache, int]:
    """Every cache that legal evictions make of these."""
    after: dict[Cache, int] = {}
    for cache, hits in states.items():
        for left in evicted(cache, held, len(cache) - capacity):
            after[left] = max(after.get(left, 0), hits)
    return after


def evicted(cache: Cache, held: set[str], excess: int) -> Iterator[Cache]:
    if excess <= 0:
        yield cache
        return
    inner = {word[:-1] for word in cache}
    seen: set[Cache] = set()
    for leaf in sorted(cache - held - inner):
        for left in evicted(cache - {leaf}, held, excess - 1):
            if left not in seen:
                seen.add(left)
                yield left


def test_what_is_used_again_last_leaves_first() -> None:
    requests = load(Words(0, 1, "abcd"), Words(9, 1, "vwxy"), Words(18, 1, "ef"), Words(27, 1, "vwxyz"))

    # LRU gives up two of the first prompt's blocks as well, but then needs a third for "z".
    assert optimum(requests, 8, role="context", warmup=0.0) == Bound(prompt_blocks=15, hit_blocks=4)


def test_an_answer_that_nobody_asks_for_leaves_first_and_in_role_context_it_is_not_there() -> None:
    requests = load(Words(0, 1, "ab", answer="cd"), Words(9, 1, "ef"), Words(18, 1, "abx"), Words(27, 1, "abcdy"))

    assert optimum(requests, 9, role="aggregated", warmup=0.0).hit_blocks == 6
    assert optimum(requests, 9, role="context", warmup=0.0).hit_blocks == 4
    assert optimum(requests[:3], 4, role="aggregated", warmup=0.0).hit_blocks == 2


def test_requests_of_the_warm_up_are_not_counted() -> None:
    requests = load(*(Words(9 * turn, 1, "abc") for turn in range(8)))

    assert optimum(requests, 99, role="context", warmup=0.0) == Bound(prompt_blocks=24, hit_blocks=14)
    assert optimum(requests, 99, role="context", warmup=0.25) == Bound(prompt_blocks=18, hit_blocks=12)


@settings(max_examples=120, deadline=None)
@given(words(most=7, longest=4, longest_s=5), st.integers(3, 9), st.sampled_from(["aggregated", "context"]))
def test_no_sequence_of_legal_evictions_does_better(requests: list[Words], capacity: int, role: Role) -> None:
    segments = segments_of(load(*requests), role=role)
    walk = Walk(segments, capacity, NextUse(segments, capacity, as_they_come(segments)))
    walk.run()
    best, bound = best_of_all(requests, capacity, role), int(walk.hits.sum())
    assume(best is not None)

    assert best is not None
    assert best <= bound
    if not segments.is_repeated_end.any():
        assert best == bound, "the bound is not reached though nothing keeps it from that"


@settings(max_examples=80, deadline=None)
@given(
    words(most=7, longest=4, longest_s=5),
    st.integers(3, 12),
    st.sampled_from(["aggregated", "context"]),
    st.sampled_from([0.0, 0.3, 0.6]),
)
def test_no_sequence_of_legal_evictions_hits_more_after_a_warm_up(
    requests: list[Words], capacity: int, role: Role, warmup: float
) -> None:
    best = best_of_all(requests, capacity, role, int(len(requests) * warmup))
    assume(best is not None)

    assert best is not None
    assert best <= optimum(load(*requests), capacity, role=role, warmup=warmup).hit_blocks


@settings(max_examples=120, deadline=None)
@given(words(most=20), st.integers(1, 40), st.sampled_from(["aggregated", "context"]), st.sampled_from([0.0, 0.3]))
def test_lru_hits_no_more_than_the_optimum_also_where_requests_overlap_and_wait_for_each_other(
    requests: list[Words], spare: int, role: Role, warmup: float
) -> None:
    segments = segments_of(load(*requests), role=role)
    endless = Walk(segments, 10**6, Recency(segments))
    endless.run()
    capacity = endless.most_held + len(requests) + spare
    lru = Walk(segments, capacity, Recency(segments))
    lru.run()

    bound = optimum_of(segments, capacity, warmup=warmup)

    assert counted(segments, lru.hits, warmup).hit_blocks <= bound.hit_blocks
