"""Ghosts: what `lru`, and the policy without demotion, would have found of the requests that the real cache served.

Rank 0 alone has them; they decide nothing themselves. What they say is measured in tokens that had to be computed, by
tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.arrays import Int32s
from worker.core.config import RetentionPolicy
from worker.core.ghost_cache import GhostCache
from worker.core.guard import Guard
from worker.core.replica import Replica
from worker.core.tiers import Tier
from worker.core.types import Request

MAX_TENANTS = 64
"""Tenants that are counted one by one; whoever comes later is counted under OTHERS."""
OTHERS = b""


@dataclass(slots=True)
class Uncached:
    """Prompt tokens that had to be computed: here, and where blocks are kept by `lru`, or never demoted."""

    real: int = 0
    lru: int = 0
    undemoted: int = 0


@dataclass(slots=True)
class Ghosts:
    """Beside one replica. `uncached`: by tenant, as `Request.tenant` names them."""

    replica: Replica
    guard: Guard = field(init=False)
    uncached: dict[bytes, Uncached] = field(default_factory=dict)
    _lru: GhostCache = field(init=False)
    _undemoted: GhostCache = field(init=False)

    def __post_init__(self) -> None:
        config = self.replica.config
        indexed = config.retention_policy is RetentionPolicy.RETURN_INDEX
        self.guard = Guard(config.retention_policy)
        self._lru = GhostCache(config.tokens_per_block, indexed=False)
        # Without demotion, `subagent` is `lru`.
        self._undemoted = GhostCache(config.tokens_per_block, indexed=True) if indexed else self._lru
        if self._undemoted.index is not None:
            self.replica.indexes.append(self._undemoted.index)

    @property
    def _caches(self) -> tuple[GhostCache, ...]:
        return (self._lru,) if self._undemoted is self._lru else (self._lru, self._undemoted)

    def begin(self, plan: int) -> None:
        for cache in self._caches:
            cache.begin(plan)

    def admitted(self, request: Request, tokens: Int32s, matched_tokens: int) -> RetentionPolicy | None:
        """A request begins for the first time, and that much of its prompt is cached. Returns the policy by which
        blocks are to be kept from now on, None: as before."""
        sequence = self.replica.sequences[request.key]
        block, room = self.replica.config.tokens_per_block, self._room
        found = [
            cache.admit(sequence, request.salt, tokens, bypass=request.bypass_prefix_cache, room=room)
            for cache in self._caches
        ]
        real = len(tokens) - matched_tokens
        lru, undemoted = len(tokens) - found[0] * block, len(tokens) - found[-1] * block
        total = self.uncached.get(request.tenant)
        if total is None:
            tenant = request.tenant if len(self.uncached) < MAX_TENANTS else OTHERS
            total = self.uncached.setdefault(tenant, Uncached())
        total.real += real
        total.lru += lru
        total.undemoted += undemoted
        return self.guard.admitted(real, lru, undemoted)

    def let_go(self, request: Request, tokens: Int32s) -> None:
        """It is over, with `tokens` computed."""
        for cache in self._caches:
            cache.let_go(request.key, tokens, self._room)

    @property
    def _room(self) -> int:
        """All pages but those that requests have for themselves, or that copies leave."""
        pools = self.replica.cache.pools
        private = sum(pools.sizes) - sum(len(free) for free in pools.free) - self.replica.cache.tree.num_blocks
        return sum(size for tier, size in zip(Tier, pools.sizes, strict=True) if tier not in pools.off) - private
