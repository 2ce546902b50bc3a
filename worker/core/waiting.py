"""Requests that wait to be admitted: those that made way, oldest first, then the new ones of all tenants in turns.

A turn costs what is computed for it: the tokens of the prompt that were not cached, and then those of the answer as
they come. So a tenant that floods waits behind itself, and the others hardly wait for it. Known to rank 0 alone: the
other ranks see what it admits.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginelink.turns import FairQueue, within_share
from worker.core.live import Live
from worker.core.outputs import Rejection

MIXED_PLANS = 4096
"""For so many plans after two tenants took turns, places are kept for others than the one that would take them all."""


class Waiting:
    """At most `bound`, and of one tenant never so many that there is no room for another's."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._suspended: list[Live] = []
        self._new: FairQueue[Live] = FairQueue()
        self._latest: bytes | None = None
        self._mixed_until = 0

    def __len__(self) -> int:
        return len(self._suspended) + len(self._new)

    @property
    def suspended(self) -> int:
        return len(self._suspended)

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return self._new.cost + sum(len(live.request.token_ids) for live in self._suspended)

    def wants(self) -> dict[bytes, int]:
        """Tokens that each tenant would have computed, at most: what is cached is not known yet."""
        wants: dict[bytes, int] = {}
        for live in self._suspended:
            wants[live.request.tenant] = wants.get(live.request.tenant, 0) + live.num_tokens
        for tenant, tokens in self._new.costs().items():
            wants[tenant] = wants.get(tenant, 0) + tokens
        return wants

    def refusal(self, tenant: bytes) -> Rejection | None:
        """Why one more of this tenant may not wait."""
        if self._new.has_room(tenant, self._bound - len(self._suspended)):
            return None
        mine = self._new.waiting(tenant)
        of_whom = "" if len(self) >= self._bound else f" of this tenant, {len(self)} in all"
        queued = mine if of_whom else len(self)
        return Rejection("OVERLOADED", f"{queued} requests are queued{of_whom}", retryable=True)

    def add(self, live: Live, plan: int) -> None:
        """One that never ran, and came before plan number `plan`."""
        if self._latest not in (None, live.request.tenant):
            self._mixed_until = plan + MIXED_PLANS
        self._latest = live.request.tenant
        self._new.push(live.request.tenant, live, len(live.request.token_ids))

    def put_back(self, live: Live) -> None:
        """One that made way."""
        self._suspended.append(live)
        self._suspended.sort(key=lambda one: one.age)

    def order(self, without: set[bytes]) -> Iterator[Live]:
        """In the order that is due. The one just given may begin meanwhile, and `without`, tenants that are passed over
        from then on, may grow."""
        for live in list(self._suspended):
            if live.request.tenant not in without:
                yield live
        for _, live in self._new.order(without):
            yield live

    def has_place(self, live: Live, running: int, free: int, plan: int) -> bool:
        """Whether it may take one of the `free` places in the batch, where `running` of its tenant are: what runs is
        not ended for others' sake, so while there are others, some places are kept for them."""
        return live.started or plan >= self._mixed_until or within_share(running, free)

    def begin(self, live: Live, cost: int) -> None:
        """It is admitted, and computes `cost` tokens of its prompt. Who made way has had its turn."""
        if live.started:
            self._suspended.remove(live)
        else:
            self._new.take(live.request.tenant, live, cost)

    def generated(self, live: Live, count: int) -> None:
        """So many more tokens of its answer."""
        self._new.charge(live.request.tenant, count)

    def drop(self, live: Live) -> None:
        """It ends before it begins."""
        if live.started:
            self._suspended.remove(live)
        else:
            self._new.drop(live.request.tenant, live)
