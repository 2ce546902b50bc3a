"""Tenants take turns, by what they cost, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from enginelink.turns import FairQueue, within_share

A, B, C = b"a", b"b", b"c"


def filled(work: Iterable[tuple[bytes, str, int]]) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for tenant, item, cost in work:
        queue.push(tenant, item, cost)
    return queue


def take(queue: FairQueue[str], cost: int | None = None) -> str:
    """The next one; `cost` where it is another than was thought."""
    tenant, item = next(queue.order())
    queue.take(tenant, item, int(item.partition("=")[2]) if cost is None else cost)
    return item


def drain(queue: FairQueue[str]) -> list[str]:
    return [take(queue) for _ in range(len(queue))]


def test_what_one_tenant_piled_up_lets_another_through() -> None:
    queue = filled((A, f"a{number}=10", 10) for number in range(100))
    taken = [take(queue), take(queue)]
    queue.push(B, "b=10", 10)

    assert [*taken, take(queue), take(queue)] == ["a0=10", "a1=10", "b=10", "a2=10"]


def test_turns_are_weighted_by_what_they_cost() -> None:
    queue = filled(
        [(A, f"a{number}=30", 30) for number in range(4)] + [(B, f"b{number}=10", 10) for number in range(9)]
    )

    first = drain(queue)[:8]

    assert first == ["a0=30", "b0=10", "b1=10", "b2=10", "a1=30", "b3=10", "b4=10", "b5=10"]


def test_within_a_tenant_what_came_first_goes_first() -> None:
    queue = filled([(A, "first=9", 9), (A, "second=1", 1), (A, "third=5", 5)])

    assert drain(queue) == ["first=9", "second=1", "third=5"]


def test_what_is_passed_over_stays_first_of_its_tenant_and_holds_up_nobody() -> None:
    queue = filled([(A, "a0=1", 1), (A, "a1=1", 1), (B, "b0=1", 1)])
    seen = []
    for tenant, item in queue.order():
        seen.append(item)
        if item != "a0=1":
            queue.take(tenant, item, 1)

    assert seen == ["a0=1", "a1=1", "b0=1"]
    assert drain(queue) == ["a0=1"]


def test_a_turn_costs_what_it_turns_out_to_cost() -> None:
    queue = filled([(A, "a0", 1000), (A, "a1", 1000), (B, "b0", 10), (B, "b1", 10)])

    assert [take(queue, 1) if name == "a" else take(queue, 10) for name in "abab"] == ["a0", "b0", "a1", "b1"]


def test_who_comes_late_does_not_catch_up_on_what_it_never_asked_for() -> None:
    queue = filled((A, f"a{number}=10", 10) for number in range(50))
    for _ in range(20):
        take(queue)
    for number in range(20):
        queue.push(B, f"b{number}=10", 10)

    following = [take(queue)[0] for _ in range(20)]

    assert sorted(following) == ["a"] * 10 + ["b"] * 10


def test_who_leaves_and_comes_back_is_not_new() -> None:
    queue = filled([(A, "a0=100", 100), (B, "b0=10", 10), (B, "b1=10", 10), (B, "b2=10", 10)])
    assert take(queue) == "a0=100"
    queue.push(A, "a1=100", 100)

    assert drain(queue) == ["b0=10", "b1=10", "b2=10", "a1=100"]


def test_what_is_charged_afterwards_puts_off_the_next_turn() -> None:
    queue = filled([(A, "a0=10", 10), (A, "a1=10", 10), (B, "b0=10", 10), (B, "b1=10", 10), (B, "b2=10", 10)])
    assert take(queue) == "a0=10"
    queue.charge(A, 15)
    queue.charge(C, 15)

    assert drain(queue) == ["b0=10", "b1=10", "b2=10", "a1=10"]


def test_what_is_dropped_costs_nobody_a_turn() -> None:
    queue = filled([(A, "a0=50", 50), (A, "a1=50", 50), (B, "b0=10", 10)])
    queue.drop(A, "a0=50")

    assert (len(queue), queue.cost, queue.costs()) == (2, 60, {A: 50, B: 10})
    assert drain(queue) == ["a1=50", "b0=10"]


def test_ever_new_tenants_hold_up_an_old_one_for_so_long_and_no_longer() -> None:
    queue = filled([(A, "a0=1000", 1000), (b"new", "n=10", 10)])
    assert take(queue) == "a0=1000"
    queue.push(A, "a1=1000", 1000)
    begun = []
    for number in range(400):
        begun.append(take(queue))
        queue.push(b"new %d" % number, f"n{number}=10", 10)

    assert 10 * begun.index("a1=1000") <= 2 * 1000 + 30


def test_memory_does_not_grow_with_the_tenants_that_ever_came() -> None:
    queue = filled([(A, "waits=1", 1)])
    for number in range(5000):
        tenant = f"t{number}".encode()
        queue.push(tenant, "x=9", 9)
        queue.take(tenant, "x=9", 9)

    assert len(queue._lines) <= 70


@pytest.mark.parametrize("bound", [64, 1000])
def test_a_tenant_that_floods_leaves_room_for_others(bound: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant in (A, B, C):
        while queue.has_room(tenant, bound):
            queue.push(tenant, "x=1", 1)
        assert queue.waiting(tenant) > 0
        assert len(queue) <= bound
    assert queue.waiting(A) == -(-bound * 4 // 5)


def test_where_there_is_room_for_one_it_is_anybodys() -> None:
    assert within_share(0, 1)
    assert not within_share(0, 0)
    assert not within_share(1, 0)


COST = 40
TENANTS = [A, B, C, b"", b"e"]


class Queues(RuleBasedStateMachine):
    """Against a list of all that waits, which is searched for whoever is due."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[list[int]] = FairQueue()
        self.waiting: list[tuple[bytes, list[int]]] = []
        self.start: dict[bytes, int] = {}
        self.turn: dict[bytes, int] = {}
        self.mean = 0
        self.taken = 0
        self.charged = 0
        self.others: dict[bytes, int] = {}
        """What others were served since a tenant that waits had its turn."""

    def of(self, tenant: bytes) -> list[list[int]]:
        return [item for name, item in self.waiting if name == tenant]

    @rule(tenant=st.sampled_from(TENANTS), cost=st.integers(1, COST))
    def work_comes(self, tenant: bytes, cost: int) -> None:
        item = [cost]
        self.queue.push(tenant, item, cost)
        if not self.of(tenant):
            self.start[tenant] = max(self.start.get(tenant, 0), self.mean)
            self.others[tenant] = 0
        self.waiting.append((tenant, item))

    def due(self) -> tuple[bytes, list[int]]:
        """Of the tenant with the lowest start, served longest ago, whose first came first."""
        firsts = dict(reversed(self.waiting))
        tenant = min(firsts, key=lambda name: (self.start[name], self.turn.get(name, 0), self.arrival(firsts[name])))
        return tenant, firsts[tenant]

    def arrival(self, item: list[int]) -> int:
        return next(at for at, (_, one) in enumerate(self.waiting) if one is item)

    def ended(self, tenant: bytes) -> None:
        if not self.waiting:
            self.start, self.turn = {}, {}
        elif not self.of(tenant) and self.start[tenant] <= self.mean:
            del self.start[tenant]
            self.turn.pop(tenant, None)

    @rule(cost=st.none() | st.integers(0, COST))
    def the_next_begins(self, cost: int | None) -> None:
        if not self.waiting:
            assert next(self.queue.order(), None) is None
            return
        tenant, item = self.due()
        assert next(self.queue.order()) == (tenant, item)
        cost = max(1, item[0] if cost is None else cost)
        self.queue.take(tenant, item, cost)
        tenants = len({name for name, _ in self.waiting})
        self.mean = max(self.mean + -(-cost // tenants), self.start[tenant])
        self.start[tenant] += cost
        self.taken += 1
        self.turn[tenant] = self.taken
        self.waiting.pop(self.arrival(item))
        for other in {name for name, _ in self.waiting}:
            self.others[other] += cost if other != tenant else -self.others[other]
            most = len(TENANTS) * (2 * COST + self.charged)
            assert self.others[other] <= most, "it waits for more than its turn"
        self.ended(tenant)

    @rule(tenant=st.sampled_from(TENANTS), cost=st.integers(1, COST))
    def what_was_taken_costs_more(self, tenant: bytes, cost: int) -> None:
        self.queue.charge(tenant, cost)
        if tenant in self.start:
            self.start[tenant] += cost
            self.charged += cost

    @rule(at=st.integers(0, 20))
    def something_is_not_wanted(self, at: int) -> None:
        if at < len(self.waiting):
            tenant, item = self.waiting.pop(at)
            self.queue.drop(tenant, item)
            self.ended(tenant)

    @invariant()
    def all_that_waits_is_there_in_its_tenants_order(self) -> None:
        order = list(self.queue.order())
        assert len(order) == len(self.queue) == len(self.waiting)
        assert self.queue.cost == sum(item[0] for _, item in self.waiting)
        for tenant in TENANTS:
            mine = self.of(tenant)
            assert [item for name, item in order if name == tenant] == mine
            assert self.queue.waiting(tenant) == len(mine)
            assert self.queue.costs().get(tenant, 0) == sum(item[0] for item in mine)


Queues.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestQueues = Queues.TestCase
