"""How many relatives a tenant may have at a time, and how deep they may nest. Pure; time is an argument."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from edge.core.types import ConversationKey, Lineage, Principal, TenantLimits

IDLE_S = 600.0
"""A conversation that sent nothing for so long, nor a child of it, counts no more."""
MAX_PARENTS = 8
"""Of one conversation, one after the other."""
MAX_REMEMBERED = 262_144


class Excess(enum.StrEnum):
    """Why a conversation may not be its parent's child."""

    DEEP = "nested too deep"
    CYCLE = "a cycle"
    PARENTS = "too many parents"
    CHILDREN = "too many children"
    CONVERSATIONS = "too many conversations"


@dataclass(slots=True)
class _Relative:
    """`parents`: all it was seen with, the present one last. `children`: how many are remembered."""

    seen_s: float
    parents: tuple[ConversationKey, ...] = ()
    children: int = 0


class _Tenant:
    """Relatives, least recently seen first. A parent stays as long as one of its children."""

    __slots__ = ("relatives", "seen_s")

    def __init__(self) -> None:
        self.relatives: OrderedDict[ConversationKey, _Relative] = OrderedDict()
        self.seen_s = 0.0

    def parent_of(self, conversation: ConversationKey) -> ConversationKey | None:
        relative = self.relatives.get(conversation)
        return relative.parents[-1] if relative is not None and relative.parents else None

    def see(self, conversation: ConversationKey, now_s: float) -> None:
        relative = self.relatives.get(conversation)
        if relative is None:
            self.relatives[conversation] = _Relative(now_s)
        else:
            relative.seen_s = now_s
            self.relatives.move_to_end(conversation)

    def forget_idle(self, now_s: float) -> int:
        """How many were forgotten."""
        forgotten = 0
        while self.relatives:
            oldest, relative = next(iter(self.relatives.items()))
            if relative.seen_s > now_s - IDLE_S:
                break
            if relative.children:
                self.see(oldest, now_s)
                continue
            self._leave_parent(oldest)
            del self.relatives[oldest]
            forgotten += 1
        return forgotten

    def move(self, child: ConversationKey, parent: ConversationKey) -> None:
        self._leave_parent(child)
        relative = self.relatives[child]
        relative.parents = (*(one for one in relative.parents if one != parent), parent)
        self.relatives[parent].children += 1

    def _leave_parent(self, child: ConversationKey) -> None:
        parent = self.parent_of(child)
        if parent is not None:
            self.relatives[parent].children -= 1


class Kinship:
    """Remembers who is whose child while they are in use: a few hundred bytes each, work bounded by the depth.

    Every tenant has a table of its own, so a flood pushes out nothing but what its own tenant has. All tables together
    hold `max_remembered`; what a tenant with room left has beyond that is let pass and not remembered. `replicas` edges
    share each tenant's limits, as in `TenantLimits.share`; `depth` is not shared.
    """

    def __init__(
        self, configured: TenantLimits, depth: int, *, replicas: int = 1, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self._configured = configured
        self._depth = depth
        self._max_remembered = max_remembered
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._remembered = 0
        self._replicas = replicas
        self._shared = configured.share(replicas)

    def __len__(self) -> int:
        """How many conversations are remembered."""
        return self._remembered

    def excess(self, principal: Principal, lineage: Lineage, now_s: float) -> Excess | None:
        """Why `lineage` may not be; None where it may, and then it is remembered."""
        self._forget_idle_tenants(now_s)
        table = self._tenants.get(principal.tenant)
        if table is not None:
            self._remembered -= table.forget_idle(now_s)
        if lineage.parent is None:
            if table is not None and lineage.conversation in table.relatives:
                table.see(lineage.conversation, now_s)
                self._touch(principal.tenant, table, now_s)
            return None
        if lineage.depth > self._depth:
            return Excess.DEEP
        table = table or _Tenant()
        if table.parent_of(lineage.conversation) != lineage.parent:
            excess = self._why_not(principal, table, lineage.conversation, lineage.parent)
            if excess is not None:
                return excess
        self._remember(principal.tenant, table, lineage.conversation, lineage.parent, now_s)
        return None

    def _why_not(
        self, principal: Principal, table: _Tenant, child: ConversationKey, parent: ConversationKey
    ) -> Excess | None:
        conversations, children = self._limits(principal)
        ancestor: ConversationKey | None = parent
        for _ in range(self._depth):
            if ancestor == child:
                return Excess.CYCLE
            ancestor = None if ancestor is None else table.parent_of(ancestor)
            if ancestor is None:
                break
        else:
            return Excess.DEEP
        relatives = table.relatives
        before = relatives[child].parents if child in relatives else ()
        if parent not in before and len(before) >= MAX_PARENTS:
            return Excess.PARENTS
        if children is not None and (relatives[parent].children if parent in relatives else 0) >= children:
            return Excess.CHILDREN
        new = (child not in relatives) + (parent not in relatives)
        if conversations is not None and new and len(relatives) + new > conversations:
            return Excess.CONVERSATIONS
        return None

    def _limits(self, principal: Principal) -> tuple[int | None, int | None]:
        """Of conversations, and of children."""
        own, shared = principal.limits, self._shared
        if own.conversations is not None or own.children is not None:
            shared = own.over(self._configured).share(self._replicas)
        return shared.conversations, shared.children

    def _remember(
        self, tenant: str, table: _Tenant, child: ConversationKey, parent: ConversationKey, now_s: float
    ) -> None:
        relatives = table.relatives
        before = len(relatives)
        new = (child not in relatives) + (parent not in relatives)
        if self._remembered + new > self._max_remembered:
            return
        table.see(child, now_s)
        table.see(parent, now_s)
        if table.parent_of(child) != parent:
            table.move(child, parent)
        self._remembered += len(relatives) - before
        self._touch(tenant, table, now_s)

    def _touch(self, tenant: str, table: _Tenant, now_s: float) -> None:
        table.seen_s = now_s
        self._tenants[tenant] = table
        self._tenants.move_to_end(tenant)

    def _forget_idle_tenants(self, now_s: float) -> None:
        while self._tenants:
            tenant, table = next(iter(self._tenants.items()))
            if table.seen_s > now_s - IDLE_S:
                break
            self._remembered -= len(table.relatives)
            del self._tenants[tenant]
