"""Families stay within their tenant's bounds, and a flood costs only the tenant that it comes from."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.core.kinship import IDLE_S, MAX_PARENTS, Excess, Kinship
from edge.core.types import ConversationKey, FamilyKey, Lineage, Principal, TenantLimits

LIMITS = TenantLimits(conversations=100, children=50)


def caller(tenant: str = "acme", **limits: int) -> Principal:
    return Principal(tenant, "alice", frozenset(), limits=TenantLimits(**limits))


def child(name: str, parent: str | None = "p", *, depth: int = 1) -> Lineage:
    key = None if parent is None else ConversationKey(parent)
    return Lineage(ConversationKey(name), FamilyKey("f"), key, depth=depth)


def make_kinship(limits: TenantLimits = LIMITS, *, depth: int = 16, replicas: int = 1) -> Kinship:
    return Kinship(limits, depth, replicas=replicas)


def test_a_parent_has_so_many_children_and_no_more_until_one_is_idle() -> None:
    kinship = make_kinship(TenantLimits(children=2))

    assert [kinship.excess(caller(), child(name), 0.0) for name in ("a", "b")] == [None, None]
    assert kinship.excess(caller(), child("a"), 1.0) is None
    assert kinship.excess(caller(), child("c"), 1.0) is Excess.CHILDREN
    assert kinship.excess(caller(), child("c", "q"), 1.0) is None
    assert kinship.excess(caller(), child("c2"), IDLE_S) is None
    assert kinship.excess(caller(), child("c3"), IDLE_S) is Excess.CHILDREN


def test_a_tenant_has_so_many_relatives_and_no_more_until_some_are_idle() -> None:
    kinship = make_kinship(TenantLimits(conversations=3))

    assert kinship.excess(caller(), child("a"), 0.0) is None
    assert kinship.excess(caller(), child("b"), 1.0) is None
    assert kinship.excess(caller(), child("c"), 1.0) is Excess.CONVERSATIONS
    assert kinship.excess(caller(), child("b"), 1.0) is None
    assert kinship.excess(caller(), child("c"), IDLE_S) is None
    assert len(kinship) == 3


def test_a_conversation_without_relatives_is_nothing_to_remember() -> None:
    kinship = make_kinship(TenantLimits(conversations=0))

    assert kinship.excess(caller(), child("a", None, depth=0), 0.0) is None
    assert len(kinship) == 0


def test_a_flood_of_one_tenant_takes_nothing_from_another() -> None:
    kinship = make_kinship()
    assert kinship.excess(caller("quiet"), child("a"), 0.0) is None

    told = [kinship.excess(caller("loud"), child(f"c{n}", f"p{n}"), 1.0) for n in range(5_000)]

    assert told[:50] == [None] * 50
    assert set(told[50:]) == {Excess.CONVERSATIONS}
    assert len(kinship) == 102
    assert kinship.excess(caller("quiet"), child("a"), 2.0) is None
    assert kinship.excess(caller("quiet"), child("p", "a"), 2.0) is Excess.CYCLE


def test_when_all_tenants_together_are_too_many_none_is_refused_and_none_forgotten() -> None:
    kinship = Kinship(LIMITS, 16, max_remembered=4)
    for tenant in ("a", "b"):
        assert kinship.excess(caller(tenant), child("c"), 0.0) is None

    assert kinship.excess(caller("late"), child("c"), 1.0) is None
    assert len(kinship) == 4
    assert kinship.excess(caller("a"), child("p", "c"), 1.0) is Excess.CYCLE
    assert kinship.excess(caller("late"), child("c"), IDLE_S + 1.0) is None
    assert len(kinship) == 2


def test_a_conversation_has_a_few_parents_one_after_the_other() -> None:
    kinship = make_kinship()

    told = [kinship.excess(caller(), child("c", f"p{n % 10_000}"), 0.0) for n in range(10_001)]

    assert told[:MAX_PARENTS] == [None] * MAX_PARENTS
    assert set(told[MAX_PARENTS:10_000]) == {Excess.PARENTS}
    assert told[-1] is None, "those it had before it may have again"
    assert len(kinship) == MAX_PARENTS + 1


def test_a_child_that_moves_leaves_room_with_its_former_parent() -> None:
    kinship = make_kinship(TenantLimits(children=1))

    assert kinship.excess(caller(), child("a", "p"), 0.0) is None
    assert kinship.excess(caller(), child("a", "q"), 0.0) is None
    assert kinship.excess(caller(), child("b", "p"), 0.0) is None
    assert kinship.excess(caller(), child("b", "q"), 0.0) is Excess.CHILDREN


def test_a_parent_is_remembered_as_long_as_one_of_its_children() -> None:
    kinship = make_kinship(TenantLimits(children=1))
    assert kinship.excess(caller(), child("a"), 0.0) is None

    assert kinship.excess(caller(), child("a", None, depth=0), IDLE_S - 1.0) is None
    assert kinship.excess(caller(), child("b", "q"), IDLE_S + 1.0) is None

    assert kinship.excess(caller(), child("c"), IDLE_S + 1.0) is Excess.CHILDREN


@pytest.mark.parametrize("length", [1, 2, 5])
def test_nobody_is_its_own_ancestor(length: int) -> None:
    kinship = make_kinship()
    for n in range(length):
        assert kinship.excess(caller(), child(f"c{n + 1}", f"c{n}"), 0.0) is None

    assert kinship.excess(caller(), child("c0", f"c{length}"), 0.0) is Excess.CYCLE


def test_families_nest_so_deep_whether_the_headers_say_it_or_earlier_requests() -> None:
    kinship = make_kinship(depth=2)

    assert kinship.excess(caller(), child("x", "y", depth=3), 0.0) is Excess.DEEP
    assert kinship.excess(caller(), child("b", "a"), 0.0) is None
    assert kinship.excess(caller(), child("c", "b"), 0.0) is None
    assert kinship.excess(caller(), child("d", "c"), 0.0) is Excess.DEEP


def test_a_principals_own_limits_come_before_the_configured_ones() -> None:
    kinship = make_kinship()

    assert kinship.excess(caller(conversations=1), child("a"), 0.0) is Excess.CONVERSATIONS
    assert kinship.excess(caller(children=0), child("a"), 0.0) is Excess.CHILDREN
    assert kinship.excess(caller(children=1), child("a"), 0.0) is None


def test_each_of_several_replicas_gives_its_part() -> None:
    kinship = make_kinship(TenantLimits(children=4), replicas=2)
    told = [kinship.excess(caller(), child(f"c{n}"), 0.0) for n in range(3)]
    assert told == [None, None, Excess.CHILDREN]

    assert kinship.excess(caller(children=6), child("c2"), 0.0) is None
    assert kinship.excess(caller(children=6), child("c3"), 0.0) is Excess.CHILDREN


@dataclasses.dataclass
class NaiveTenant:
    """As `Kinship` promises, by looking at everything every time. Oldest first; parents with the present one last."""

    seen_s: float = 0.0
    relatives: dict[str, tuple[float, list[str]]] = dataclasses.field(default_factory=dict)

    def children(self, parent: str) -> int:
        return sum(1 for _, parents in self.relatives.values() if parents and parents[-1] == parent)

    def see(self, name: str, now_s: float) -> None:
        _, parents = self.relatives.pop(name, (0.0, []))
        self.relatives[name] = (now_s, parents)

    def forget(self, now_s: float) -> None:
        while idle := [name for name, (seen_s, _) in self.relatives.items() if seen_s <= now_s - IDLE_S]:
            if self.children(idle[0]):
                self.see(idle[0], now_s)
            else:
                del self.relatives[idle[0]]


class Naive:
    def __init__(self, conversations: int, children: int, depth: int) -> None:
        self.limits = (conversations, children, depth)
        self.tenants: dict[str, NaiveTenant] = {}

    def excess(self, tenant: str, name: str, parent: str | None, now_s: float) -> Excess | None:
        self.tenants = {who: one for who, one in self.tenants.items() if one.seen_s > now_s - IDLE_S}
        table = self.tenants.get(tenant, NaiveTenant())
        table.forget(now_s)
        if parent is None:
            if name in table.relatives:
                table.see(name, now_s)
                table.seen_s = now_s
            return None
        _, parents = table.relatives.get(name, (0.0, []))
        if not parents or parents[-1] != parent:
            why_not = self.why_not(table, name, parent, parents)
            if why_not is not None:
                return why_not
        table.see(name, now_s)
        table.see(parent, now_s)
        seen_s, parents = table.relatives[name]
        table.relatives[name] = (seen_s, [*(one for one in parents if one != parent), parent])
        table.seen_s = now_s
        self.tenants[tenant] = table
        return None

    def why_not(self, table: NaiveTenant, name: str, parent: str, parents: list[str]) -> Excess | None:
        conversations, children, depth = self.limits
        above = [parent]
        while above[-1] in table.relatives and table.relatives[above[-1]][1]:
            above.append(table.relatives[above[-1]][1][-1])
        if name in above[:depth]:
            return Excess.CYCLE
        if len(above) > depth:
            return Excess.DEEP
        if parent not in parents and len(parents) >= MAX_PARENTS:
            return Excess.PARENTS
        if table.children(parent) >= children:
            return Excess.CHILDREN
        if len({name, parent} | table.relatives.keys()) > max(conversations, len(table.relatives)):
            return Excess.CONVERSATIONS
        return None


names = st.sampled_from("abcdef")
requests = st.tuples(st.sampled_from(["t", "u"]), names, st.none() | names, st.sampled_from([0.0, 1.0, 250.0]))


@settings(max_examples=200)
@given(st.lists(requests, max_size=40))
def test_whatever_comes_is_decided_as_by_counting_everything_again(
    coming: list[tuple[str, str, str | None, float]],
) -> None:
    kinship, naive, now_s = make_kinship(TenantLimits(conversations=6, children=2), depth=3), Naive(6, 2, 3), 0.0

    for tenant, name, parent, passed_s in coming:
        now_s += passed_s
        told = kinship.excess(caller(tenant), child(name, None if parent == name else parent), now_s)
        assert told == naive.excess(tenant, name, None if parent == name else parent, now_s)
        assert len(kinship) == sum(len(one.relatives) for one in naive.tenants.values())
