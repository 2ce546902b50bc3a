"""Where a turn goes, and why."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet, Role
from edge.core.headers import HeaderFamilies, fold
from edge.core.kv_index import KvBatch, Stored
from edge.core.prompt_keys import Prompt
from edge.core.resident import Held
from edge.core.routing import Placement, Router, RouterConfig, RouterType, rendezvous_order
from edge.core.types import ConversationKey, FamilyKey, Lineage, Principal, Scope, WorkerId
from enginelink.block_keys import BlockScope, block_keys, scope_key
from tests.edge.core.lineages import make_lineages

CONTEXT = [WorkerId(f"10.0.0.{number}:9000") for number in range(1, 9)]
GENERATION = [WorkerId(f"10.0.1.{number}:9000") for number in range(1, 9)]


def make_fleet(context: list[WorkerId], generation: list[WorkerId]) -> Fleet:
    fleet = Fleet(context, generation)
    for worker in fleet.workers:
        fleet.joined(worker, f"{worker}-1", 4096)
    return fleet


def make_router(context: int = 2, generation: int = 2, **config: Any) -> Router:
    return Router(RouterConfig(**config), make_fleet(CONTEXT[:context], GENERATION[:generation]))


def family(name: str) -> Lineage:
    return Lineage(ConversationKey(name), FamilyKey(name))


def favourites(router: Router, name: str, role: Role = Role.CONTEXT) -> list[WorkerId]:
    return [worker.worker_id for worker in rendezvous_order(FamilyKey(name), router._fleet.usable(role))]


def load(router: Router, worker: WorkerId, legs: int) -> None:
    for _ in range(legs):
        router._fleet.began(worker)


def children(count: int) -> list[Lineage]:
    """Of one parent."""
    return [
        Lineage(ConversationKey(f"c{number}"), FamilyKey("parent"), ConversationKey("parent"), depth=1)
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", ["conversation", "kv_cache_aware"])
def test_a_familys_prompts_come_together_and_its_answers_only_where_that_is_asked_for(kind: RouterType) -> None:
    by_context = [make_router(4, 4, type=kind).place(child, 10) for child in children(32)]
    both = [make_router(4, 4, type=kind, subagent_affinity_scope="both").place(child, 10) for child in children(32)]

    assert len({placement.context for placement in by_context}) == 1
    assert len({placement.generation for placement in by_context}) == 4
    assert len({placement.context for placement in both}) == len({placement.generation for placement in both}) == 1


def test_a_conversation_keeps_its_generation_worker_whatever_the_scope() -> None:
    router = make_router(4, 4)
    child = children(1)[0]

    assert len({router.place(child, 10).generation for _ in range(8)}) == 1
    assert router.generation_for(child, connector="kinroute")[0] == router.place(child, 10).generation


def test_where_workers_do_both_phases_a_family_comes_together_whatever_the_scope() -> None:
    router = Router(RouterConfig(), make_fleet(GENERATION[:4], GENERATION[:4]))

    assert len({router.place(child, 10).generation for child in children(32)}) == 1


def test_a_family_goes_to_its_favourites_and_is_told_why() -> None:
    router = make_router()
    [context, _], [generation, _] = favourites(router, "f"), favourites(router, "f", Role.GENERATION)

    assert router.place(family("f"), 10) == Placement(
        context,
        generation,
        (f"context {context}: choice 1 of the family", f"generation {generation}: choice 1 of the family"),
    )


def test_two_edges_place_a_hundred_families_alike_without_talking() -> None:
    """Children by their parent's id, depth 3 by headers that carry the root, distinct prompts."""
    one, other = make_router(), make_router()
    lineages, caller = make_lineages(), Principal("acme", "alice", frozenset({Scope.AFFINITY}))
    families, used = HeaderFamilies(), Counter[WorkerId | None]()

    def lineage(*headers: tuple[str, str], content: bytes = b"") -> Lineage:
        return lineages.believe(families.read(fold(headers)), None, caller, content, 0.0).lineage

    for number in range(100):
        session = ("x-claude-code-session-id", f"s{number}")
        root = lineage(session)
        child = lineage(("x-kinroute-parent-id", f"s{number}"), ("x-kinroute-conversation-id", f"c{number}"))
        third = lineage(session, ("x-claude-code-agent-id", "b"), ("x-claude-code-parent-agent-id", "a"))
        alone = lineage(content=f"prompt {number}".encode())
        for member in (root, child, third, alone):
            assert one.place(member, 10) == other.place(member, 10)
        contexts = {one.place(member, 10).context for member in (root, child, third)}
        assert len(contexts) == 1, "a family is in two places"
        used.update(contexts)
    assert min(used[worker] for worker in CONTEXT[:2]) > 30


def test_a_familys_order_is_the_same_in_every_process() -> None:
    assert favourites(make_router(context=4), "f") == [CONTEXT[at] for at in (2, 0, 1, 3)]


def test_families_spread_evenly() -> None:
    router = make_router(context=4)
    used = Counter(router.place(family(f"f{number}"), 10).context for number in range(1000))

    assert set(used) == set(CONTEXT[:4])
    assert max(used.values()) < 1.3 * min(used.values())


def test_a_worker_that_leaves_moves_only_its_own_families() -> None:
    router = make_router(context=4)
    before = {number: router.place(family(f"f{number}"), 10).context for number in range(200)}
    router._fleet.lost(CONTEXT[0])

    for number, worker in before.items():
        now = router.place(family(f"f{number}"), 10).context
        assert now != CONTEXT[0]
        assert worker in (CONTEXT[0], now)


def test_a_family_above_the_bound_spills_along_its_own_order_and_no_further() -> None:
    router = make_router(context=8, spill_depth=3)
    order = favourites(router, "f")
    placed = []
    for _ in range(60):
        context = router.place(family("f"), 10).context
        assert context is not None
        router._fleet.began(context)
        placed.append(context)

    assert placed[:2] == order[:2], "a bound of one leg, where eight workers share two"
    assert set(placed) == set(order[:3])
    assert max(Counter(placed).values()) - min(Counter(placed).values()) <= 1
    assert "all above" in router.place(family("f"), 10).reasons[0]


def test_the_reason_names_the_bound_that_the_favourite_is_above() -> None:
    router = make_router()
    first, second = favourites(router, "f")
    load(router, first, 4)

    placement = router.place(family("f"), 10)
    assert placement.context == second
    assert placement.reasons[0] == f"context {second}: choice 2 of the family, 1 above the bound of 4"


def test_what_a_worker_does_for_other_edges_counts() -> None:
    router = make_router()
    first, second = favourites(router, "f")
    router._fleet.reported(first, 4, draining=False)

    assert router.place(family("f"), 10).context == second


def test_workers_that_failed_a_turn_are_avoided_while_there_are_others() -> None:
    router = make_router()
    first, second = favourites(router, "f")

    assert router.place(family("f"), 10, avoid=[first]).context == second
    assert router.place(family("f"), 10, avoid=[first, second]).context == first
    [one, two] = favourites(router, "f", Role.GENERATION)
    assert router.generation_for(family("f"), connector="kinroute", avoid=[one])[0] == two


@pytest.mark.parametrize(("role", "lost"), [("context", CONTEXT[:2]), ("generation", GENERATION[:2])])
def test_a_phase_without_a_ready_worker_is_an_overload_that_passes(role: str, lost: list[WorkerId]) -> None:
    router = make_router()
    for worker in lost:
        router._fleet.lost(worker)

    with pytest.raises(EdgeError, match=f"No {role} worker is ready") as caught:
        router.place(family("f"), 10)
    assert (caught.value.code, caught.value.retryable) == (Code.OVERLOADED, True)
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize("router_type", ["conversation", "kv_cache_aware", "load_balancing", "round_robin"])
def test_a_worker_that_does_both_phases_does_them_alone(router_type: str) -> None:
    both = CONTEXT[:3]
    router = Router(RouterConfig(router_type), make_fleet(both, both))  # type: ignore[arg-type]

    for number in range(20):
        placement = router.place(family(f"f{number}"), 10)
        assert placement.context is None
        assert placement.reasons[1] == "one worker for both phases"


def test_a_short_rest_is_prefilled_by_the_generation_worker_alone() -> None:
    router = make_router(max_local_prefill_tokens=8)
    generation = favourites(router, "f", Role.GENERATION)[0]

    assert router.place(family("f"), 8).context is None
    assert router.place(family("f"), 100).context is not None
    router.served(family("f"), generation, 95)
    placement = router.place(family("f"), 100)
    assert (placement.context, placement.generation) == (None, generation)
    assert placement.reasons[1] == "prefill of 5 tokens is short: generation worker alone"
    assert router.place(family("f"), 104).context is not None


def test_what_another_generation_worker_has_makes_no_rest_short() -> None:
    router = make_router(max_local_prefill_tokens=8)
    generation, other = favourites(router, "f", Role.GENERATION)
    router.served(family("f"), other, 95)
    assert router.place(family("f"), 100).context is not None

    router.served(family("f"), generation, 95)
    router._fleet.joined(generation, "started again", 4096)
    assert router.place(family("f"), 100).context is not None


def test_a_limit_of_no_tokens_never_leaves_the_prefill_to_the_generation_worker() -> None:
    router = make_router(max_local_prefill_tokens=0)
    router.served(family("f"), favourites(router, "f", Role.GENERATION)[0], 100)

    assert router.place(family("f"), 100).context is not None


def test_round_robin_uses_every_worker_of_both_phases_in_turn() -> None:
    router = make_router(type="round_robin")
    placements = [router.place(family("f"), 10) for _ in range(4)]

    assert [placement.context for placement in placements] == CONTEXT[:2] * 2
    assert [placement.generation for placement in placements] == GENERATION[:2] * 2


def test_load_balancing_takes_the_least_loaded() -> None:
    router = make_router(type="load_balancing")
    load(router, CONTEXT[0], 1)
    load(router, GENERATION[1], 1)

    placement = router.place(family("f"), 10)
    assert (placement.context, placement.generation) == (CONTEXT[1], GENERATION[0])


def test_kv_cache_aware_prefers_who_was_sent_most_of_the_conversation() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, _ = favourites(router, "f")
    assert router.place(family("f"), 10).context == first

    router.place(family("f"), 50, avoid=[first])
    placement = router.place(family("f"), 60)
    assert placement.context == second
    assert placement.reasons[0] == f"context {second}: was sent 50 tokens of it, choice 2"


def test_kv_cache_aware_places_a_child_where_its_parents_prefix_is() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, _ = favourites(router, "p")
    router.place(family("p"), 50, avoid=[first])
    child = Lineage(ConversationKey("c"), FamilyKey("p"), ConversationKey("p"), depth=1)

    assert router.place(child, 10).context == second


def test_kv_cache_aware_does_not_follow_a_prefix_beyond_the_spill_depth() -> None:
    router = make_router(type="kv_cache_aware", context=3, spill_depth=2)
    first, second, third = favourites(router, "f")
    assert router.place(family("f"), 50, avoid=[first, second]).context == third

    assert router.place(family("f"), 60).context == first


def test_kv_cache_aware_does_not_follow_a_prefix_to_a_worker_above_the_bound() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, _ = favourites(router, "f")
    assert router.place(family("f"), 50, avoid=[first]).context == second
    load(router, second, 9)

    assert router.place(family("f"), 60).context == first


def test_kv_cache_aware_does_not_follow_a_prefix_to_a_worker_that_is_just_at_its_bound() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, _ = favourites(router, "f")
    assert router.place(family("f"), 50, avoid=[first]).context == second
    load(router, second, 2)

    assert router.place(family("f"), 60).context == first


def test_kv_cache_aware_follows_the_family_where_no_prefix_is_known() -> None:
    router = make_router(type="kv_cache_aware")
    [first, second] = favourites(router, "f")
    assert router.place(family("f"), 10).reasons[0] == f"context {first}: choice 1 of the family"

    crowded = make_router(type="kv_cache_aware", spill_depth=1)
    load(crowded, first, 9)
    load(crowded, second, 1)
    assert "all above" in crowded.place(family("f"), 10).reasons[0]


def test_kv_cache_aware_keeps_a_child_where_its_own_prefix_is() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, _ = favourites(router, "p")
    child = Lineage(ConversationKey("c"), FamilyKey("p"), ConversationKey("p"), depth=1)
    assert router.place(child, 50, avoid=[first]).context == second

    assert router.place(child, 60).context == second


def test_kv_cache_aware_knows_what_a_worker_for_both_phases_was_sent() -> None:
    both = CONTEXT[:3]
    router = Router(RouterConfig("kv_cache_aware"), make_fleet(both, both))
    first, second, _ = favourites(router, "f", Role.GENERATION)
    assert router.place(family("f"), 50, avoid=[first]).generation == second

    assert router.place(family("f"), 60).generation == second


def follow(router: Router, worker: WorkerId, prompt: Prompt, tokens: int) -> None:
    """The worker's events have told that it holds the first `tokens` tokens of `prompt`, in blocks of 4."""
    fleet = router._fleet
    fleet.joined(worker, "k1", 4096, 4)
    fleet.kv.connected(worker, "k1")
    scope = scope_key(BlockScope(prompt.salt))
    keys = b"".join(block_keys(scope, prompt.token_ids[: 4 * tokens], 4))
    changes = [Stored(scope, keys, Held.DEVICE, True)] if keys else []
    fleet.kv.feed(worker, KvBatch("k1", 1, changes, snapshot=True, begin=True, end=True))


def make_prompt(tokens: int, salt: bytes = b"s") -> Prompt:
    return Prompt(np.arange(tokens, dtype="<u4").tobytes(), salt)


def test_kv_cache_aware_goes_by_what_a_cache_holds_and_not_by_what_was_sent() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, third = favourites(router, "f")
    prompt = make_prompt(60)
    router.place(family("f"), 60, avoid=[first, third])
    follow(router, first, prompt, 0)
    follow(router, second, prompt, 0)
    follow(router, third, prompt, 42)

    placement = router.place(family("f"), 60, prompt=prompt)
    assert placement.context == third
    assert placement.reasons[0] == f"context {third}: holds 40 tokens of it, choice 3"


def test_kv_cache_aware_goes_by_what_was_sent_where_no_events_come() -> None:
    router = make_router(type="kv_cache_aware", context=3)
    first, second, third = favourites(router, "f")
    prompt = make_prompt(60)
    router.place(family("f"), 50, avoid=[first, third])
    follow(router, first, prompt, 40)

    assert router.place(family("f"), 60, prompt=prompt).context == second


def test_a_cache_of_another_salt_holds_nothing_of_a_prompt() -> None:
    router = make_router(type="kv_cache_aware")
    first, second = favourites(router, "f")
    follow(router, first, make_prompt(60), 0)
    follow(router, second, make_prompt(60, salt=b"another tenant's"), 60)

    assert router.place(family("f"), 60, prompt=make_prompt(60)).context == first


@pytest.mark.parametrize(("held", "goes_there"), [(39, False), (40, True)])
def test_a_family_leaves_its_favourite_only_for_a_cache_that_holds_clearly_more(held: int, goes_there: bool) -> None:
    router = make_router(context=3, clear_gain_tokens=32)
    first, second, _ = favourites(router, "f")
    prompt = make_prompt(60)
    follow(router, first, prompt, 8)
    follow(router, second, prompt, held)

    placement = router.place(family("f"), 60, prompt=prompt)
    assert placement.context == (second if goes_there else first)
    assert not goes_there or placement.reasons[0] == f"context {second}: holds 40 tokens of it, choice 2"


def test_no_cache_takes_a_family_beyond_its_spill_depth_or_to_a_worker_above_the_bound() -> None:
    router = make_router(context=3, spill_depth=2, clear_gain_tokens=8)
    first, second, third = favourites(router, "f")
    prompt = make_prompt(60)
    for worker, held in ((first, 0), (second, 20), (third, 60)):
        follow(router, worker, prompt, held)
    assert router.place(family("f"), 60, prompt=prompt).context == second

    load(router, second, 9)
    assert router.place(family("f"), 60, prompt=prompt).context == first


def test_a_worker_whose_link_is_lost_counts_as_one_that_holds_nothing() -> None:
    router = make_router(clear_gain_tokens=8)
    first, second = favourites(router, "f")
    prompt = make_prompt(60)
    follow(router, first, prompt, 0)
    follow(router, second, prompt, 60)
    router._fleet.lost(second)
    router._fleet.joined(second, "k2", 4096, 4)

    assert router.place(family("f"), 60, prompt=prompt).context == first


def test_a_rest_is_short_by_what_the_generation_workers_cache_holds_now() -> None:
    router = make_router(max_local_prefill_tokens=8)
    generation = favourites(router, "f", Role.GENERATION)[0]
    prompt = make_prompt(100)
    router.served(family("f"), generation, 95)
    follow(router, generation, prompt, 40)
    assert router.place(family("f"), 100, prompt=prompt).context is not None, "it was evicted"

    follow(router, generation, prompt, 92)
    placement = router.place(family("f"), 100, prompt=prompt)
    assert placement.context is None
    assert placement.reasons[1] == "prefill of 8 tokens is short: generation worker alone"


def test_keys_are_computed_only_where_a_choice_depends_on_them() -> None:
    prompt = make_prompt(60)
    alone, unheard, short = make_router(context=1, generation=1), make_router(), make_router()
    follow(alone, CONTEXT[0], prompt, 60)
    for worker in CONTEXT[:2]:
        follow(short, worker, prompt, 60)
    for router in (alone, unheard, short):
        router.place(family("f"), 60, prompt=prompt)
        assert not router._keys._known


def test_the_leg_to_be_placed_counts_once_in_the_mean() -> None:
    """Two legs on two workers: a mean of 1.5 with this one, so a bound of 2."""
    router = make_router()
    first, second = favourites(router, "f")
    load(router, first, 2)

    assert router.place(family("f"), 10).context == second


def bound_of(fleet: Fleet, config: RouterConfig) -> float:
    loads = [worker.load for worker in fleet.usable(Role.CONTEXT)]
    return config.load_bound * (sum(loads) + 1) / len(loads)


class TwoEdges(RuleBasedStateMachine):
    """Two routers that never talk, with the same workers: reports reach both, and each knows its own legs at once."""

    config = RouterConfig(spill_depth=2)

    def __init__(self) -> None:
        super().__init__()
        self.edges = [Router(self.config, make_fleet(CONTEXT[:4], GENERATION[:4])) for _ in range(2)]
        self.legs: list[tuple[int, WorkerId]] = []
        self.starts = itertools.count(2)

    workers = st.sampled_from(CONTEXT[:4])

    @rule(worker=workers)
    def a_worker_is_lost(self, worker: WorkerId) -> None:
        others = [one for one in self.edges[0]._fleet.usable(Role.CONTEXT) if one.worker_id != worker]
        if others:
            for edge in self.edges:
                edge._fleet.lost(worker)

    @rule(worker=workers)
    def a_worker_comes(self, worker: WorkerId) -> None:
        start = next(self.starts)
        for edge in self.edges:
            edge._fleet.joined(worker, str(start), 4096)

    @rule(worker=workers)
    def a_worker_reports(self, worker: WorkerId) -> None:
        total = sum(1 for _, on in self.legs if on == worker)
        for edge in self.edges:
            edge._fleet.reported(worker, total, draining=False)

    @rule(edge=st.integers(0, 1), number=st.integers(0, 5))
    def a_leg_begins(self, edge: int, number: int) -> None:
        worker = self.edges[edge].place(family(f"f{number}"), 10).context
        assert worker is not None
        self.edges[edge]._fleet.began(worker)
        self.legs.append((edge, worker))

    @rule(at=st.integers(0, 20))
    def a_leg_ends(self, at: int) -> None:
        if at < len(self.legs):
            edge, worker = self.legs.pop(at)
            self.edges[edge]._fleet.ended(worker)

    @invariant()
    def families_are_placed_alike_while_no_worker_is_above_its_bound_and_near_otherwise(self) -> None:
        calm = all(
            worker.load < bound_of(edge._fleet, self.config)
            for edge in self.edges
            for worker in edge._fleet.usable(Role.CONTEXT)
        )
        for number in range(6):
            placed = {edge.place(family(f"f{number}"), 10).context for edge in self.edges}
            order = favourites(self.edges[0], f"f{number}")
            assert placed <= set(order[: self.config.spill_depth])
            assert not calm or placed == {order[0]}


TwoEdges.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTwoEdges = TwoEdges.TestCase


def test_a_few_siblings_at_a_time_stay_together_on_an_idle_fleet() -> None:
    router = make_router(context=8, min_bound=4)
    favourite = favourites(router, "family")[0]

    for _ in range(4):
        assert router.place(family("family"), 10).context == favourite
        load(router, favourite, 1)

    assert router.place(family("family"), 10).context != favourite, "a fifth is one too many"


def test_a_return_is_told_to_the_familys_first_workers_that_do_not_serve_it() -> None:
    router = make_router(context=8, spill_depth=3)
    first, second, third, *_ = favourites(router, "f")

    assert router.may_hold_children(family("f"), first) == [second, third]
    assert router.may_hold_children(family("f"), second) == [first, third]
    assert router.may_hold_children(family("f"), GENERATION[0]) == [first, second, third], "a short rest, done alone"


def test_a_return_of_a_child_is_told_where_its_own_children_are_placed() -> None:
    """They name it as their parent, and carry no root: so they are placed by it."""
    router = make_router(context=8, spill_depth=1)
    child = Lineage(ConversationKey("c"), FamilyKey("f"), parent=ConversationKey("f"), depth=1)
    grandchild = Lineage(ConversationKey("g"), FamilyKey("c"), parent=ConversationKey("c"), depth=1)
    theirs = router.place(grandchild, 10).context

    assert theirs not in favourites(router, "f")[:1], "another worker, or this shows nothing"
    assert router.may_hold_children(child, favourites(router, "f")[0]) == [theirs]


def test_a_deep_conversation_whose_root_is_carried_is_told_of_in_its_family_alone() -> None:
    router = make_router(context=8, spill_depth=1)
    deep = Lineage(ConversationKey("d"), FamilyKey("f"), parent=ConversationKey("c"), depth=2)

    assert router.may_hold_children(deep, favourites(router, "f")[1]) == favourites(router, "f")[:1]


def test_a_return_is_not_told_to_workers_that_are_gone() -> None:
    router = make_router(context=2)
    first, second = favourites(router, "f")
    router._fleet.lost(second)

    assert router.may_hold_children(family("f"), first) == []
