"""Ghosts: what `lru`, and the policy without demotion, would have found of the requests that the real cache served.

Rank 0 alone has them; they decide nothing themselves. What they say is measured in tokens that had to be computed, by
tenant.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Of so many requests, prompt tokens that had to be computed: here, and where blocks are kept by `lru`, or never
    demoted."""

    requests: int = 0
    real: int = 0
    lru: int = 0
    undemoted: int = 0


class Ghosts:
    """Beside one replica. `uncached`: by tenant, as `Request.tenant` names them.

    Without demotion, `subagent` is `lru`. `return_index` has a ghost of its own only while the real cache is kept
    otherwise: with demotion, or since the guard fell back.
    """

    def __init__(self, replica: Replica) -> None:
        self.uncached: dict[bytes, Uncached] = {}
        self.guard = Guard(replica.config.retention_policy)
        self._replica = replica
        self._lru = GhostCache(replica.config.tokens_per_block, indexed=False)
        self._indexed: GhostCache | None = None
        self._follow_policy()

    @property
    def _caches(self) -> tuple[GhostCache, ...]:
        return (self._lru,) if self._indexed is None else (self._lru, self._indexed)

    def begin(self, plan: int) -> None:
        for cache in self._caches:
            cache.begin(plan)

    def admitted(self, request: Request, tokens: Int32s, matched_tokens: int) -> RetentionPolicy | None:
        """A request begins for the first time, and that much of its prompt is cached. Returns the policy by which
        blocks are to be kept from now on, None: as before."""
        sequence = self._replica.sequences[request.key]
        block, room, bypass = self._replica.config.tokens_per_block, self._room, request.bypass_prefix_cache
        found = [cache.admit(sequence, request.salt, tokens, bypass=bypass, room=room) for cache in self._caches]
        real = len(tokens) - matched_tokens
        lru = undemoted = len(tokens) - found[0] * block
        if self._replica.index is not None:
            undemoted = real if self._indexed is None else len(tokens) - found[1] * block
        total = self._total(request.tenant)
        total.requests += 1
        total.real += real
        total.lru += lru
        total.undemoted += undemoted
        wanted = self.guard.admitted(real, lru, undemoted)
        if wanted is not None:
            self._follow_policy()
        return wanted

    def _total(self, tenant: bytes) -> Uncached:
        if tenant not in self.uncached and len(self.uncached) >= MAX_TENANTS:
            tenant = OTHERS
        return self.uncached.setdefault(tenant, Uncached())

    def let_go(self, request: Request, tokens: Int32s) -> None:
        """It is over, with `tokens` computed."""
        for cache in self._caches:
            cache.let_go(request.key, tokens, self._room)

    def _follow_policy(self) -> None:
        """Have the ghost of the index, or have it not, by what is in force."""
        config, index = self._replica.config, self._replica.index
        if index is None:
            return
        wanted = config.finished_subagent_priority is not None or self.guard.active is not self.guard.configured
        if wanted and self._indexed is None:
            self._indexed = GhostCache(config.tokens_per_block, indexed=True)
            assert self._indexed.index is not None
            self._indexed.index.tables = index.tables
            self._replica.indexes.append(self._indexed.index)
        elif not wanted and self._indexed is not None:
            self._replica.indexes = [index]
            self._indexed = None

    @property
    def _room(self) -> int:
        """All pages but those that requests have for themselves, or that copies leave."""
        pools = self._replica.cache.pools
        private = sum(pools.sizes) - sum(len(free) for free in pools.free) - self._replica.cache.tree.num_blocks
        return sum(size for tier, size in zip(Tier, pools.sizes, strict=True) if tier not in pools.off) - private
