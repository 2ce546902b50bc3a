"""Which workers serve a turn: filter, score, pick; and why, for the receipt.

Families go to workers by rendezvous hashing (Thaler and Ravishankar, 1998), so replicas agree without talking and a
worker that comes or goes moves only its own families. Load is bounded (after Mirrokni, Thorup and Zadimoghaddam, 2018):
a worker above `load_bound` times the mean passes a family on, within the first `spill_depth` workers of its order.
`kv_cache_aware` prefers, among those that are not above it, the one that was sent most of the conversation.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet, Role, Worker
from edge.core.prefix_index import PrefixIndex
from edge.core.types import FamilyKey, Lineage, WorkerId

RouterType = Literal["conversation", "kv_cache_aware", "load_balancing", "round_robin"]
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`min_bound`: a worker with fewer requests is never above its bound, however idle the others are.
    `max_local_prefill_tokens`: a prompt with at most this many tokens that are not known to be cached goes to the
    generation worker alone; 0 is never."""

    type: RouterType = "conversation"
    spill_depth: int = 4
    load_bound: float = 1.25
    min_bound: int = 1
    max_local_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """`context` None: the generation worker does both phases. `reasons`: a line for each choice."""

    context: WorkerId | None
    generation: WorkerId
    reasons: tuple[str, ...]


class Router:
    """Places turns on the ready workers of `fleet`."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._turns = {role: itertools.count() for role in (Role.CONTEXT, Role.GENERATION)}
        self._prefixes = PrefixIndex()

    def place(self, lineage: Lineage, prompt_tokens: int, *, avoid: Collection[WorkerId] = ()) -> Placement:
        """`avoid`: workers that failed this turn; they are used only where there is no other.

        Raises EdgeError OVERLOADED where a phase has no ready worker.
        """
        generation, why_generation = self._choose(Role.GENERATION, lineage.family, avoid, lineage)
        local = self._local_prefill(lineage, prompt_tokens, generation)
        if local is not None:
            return Placement(None, generation.worker_id, (why_generation, local))
        if Role.CONTEXT in generation.role:
            self._prefixes.note(lineage.conversation, generation, prompt_tokens)
            return Placement(None, generation.worker_id, (why_generation, "one worker for both phases"))
        context, why_context = self._choose(Role.CONTEXT, lineage.family, avoid, lineage)
        self._prefixes.note(lineage.conversation, context, prompt_tokens)
        return Placement(context.worker_id, generation.worker_id, (why_context, why_generation))

    def generation_for(self, family: FamilyKey, *, avoid: Collection[WorkerId] = ()) -> tuple[WorkerId, str]:
        """Another generation worker, for a leg that failed. Raises EdgeError OVERLOADED."""
        worker, why = self._choose(Role.GENERATION, family, avoid)
        return worker.worker_id, why

    def served(self, lineage: Lineage, generation: WorkerId, tokens: int) -> None:
        """The generation worker has the first `tokens` tokens of this conversation now."""
        self._prefixes.note(lineage.conversation, self._fleet.workers[generation], tokens)

    def _local_prefill(self, lineage: Lineage, prompt_tokens: int, generation: Worker) -> str | None:
        limit = self._config.max_local_prefill_tokens
        if limit == 0:
            return None
        rest = max(0, prompt_tokens - self._prefixes.tokens(lineage.conversation, generation))
        return f"prefill of {rest} tokens is short: generation worker alone" if rest <= limit else None

    def _choose(
        self, role: Role, family: FamilyKey, avoid: Collection[WorkerId], lineage: Lineage | None = None
    ) -> tuple[Worker, str]:
        phase = "context" if role is Role.CONTEXT else "generation"
        usable = self._fleet.usable(role)
        if not usable:
            message = f"No {phase} worker is ready."
            raise EdgeError(Code.OVERLOADED, message, retryable=True, retry_after_s=RETRY_AFTER_S)
        candidates = [worker for worker in usable if worker.worker_id not in avoid] or usable
        match self._config.type:
            case "round_robin":
                worker = candidates[next(self._turns[role]) % len(candidates)]
                return worker, f"{phase} {worker.worker_id}: its turn"
            case "load_balancing":
                worker = min(candidates, key=lambda one: (one.load, one.worker_id))
                return worker, f"{phase} {worker.worker_id}: least load ({worker.load})"
            case "kv_cache_aware" if lineage is not None:
                return self._by_prefix(phase, lineage, candidates)
            case "conversation" | "kv_cache_aware":
                return self._by_family(phase, family, candidates)

    def _by_family(self, phase: str, family: FamilyKey, candidates: Sequence[Worker]) -> tuple[Worker, str]:
        order, bound = self._order(family, candidates)
        for rank, worker in enumerate(order):
            if worker.load < bound:
                passed = f", {rank} above the bound of {bound}" if rank else ""
                return worker, f"{phase} {worker.worker_id}: choice {rank + 1} of the family{passed}"
        worker = min(order, key=lambda one: one.load)
        return worker, f"{phase} {worker.worker_id}: least load of the family's first {len(order)}, all above {bound}"

    def _by_prefix(self, phase: str, lineage: Lineage, candidates: Sequence[Worker]) -> tuple[Worker, str]:
        order, bound = self._order(lineage.family, candidates)
        worker = max(
            (one for one in order if one.load < bound), key=lambda one: self._known(lineage, one), default=None
        )
        known = 0 if worker is None else self._known(lineage, worker)
        if worker is None or known == 0:
            return self._by_family(phase, lineage.family, candidates)
        return worker, f"{phase} {worker.worker_id}: was sent {known} tokens of it, choice {order.index(worker) + 1}"

    def _known(self, lineage: Lineage, worker: Worker) -> int:
        """Tokens of the conversation that the worker was sent; of its parent where it was sent none of its own."""
        own = self._prefixes.tokens(lineage.conversation, worker)
        return own if own or lineage.parent is None else self._prefixes.tokens(lineage.parent, worker)

    def _order(self, family: FamilyKey, candidates: Sequence[Worker]) -> tuple[list[Worker], int]:
        """Where the family may go, its favourite first, and the load from which on a worker passes it on."""
        mean = (sum(worker.load for worker in candidates) + 1) / len(candidates)
        order = rendezvous_order(family, candidates)[: self._config.spill_depth]
        return order, max(self._config.min_bound, math.ceil(self._config.load_bound * mean))


def rendezvous_order(family: FamilyKey, workers: Sequence[Worker]) -> list[Worker]:
    """All workers, the family's favourite first; the same on every replica."""
    return sorted(workers, key=lambda worker: _weight(family, worker.worker_id), reverse=True)


def _weight(family: FamilyKey, worker_id: WorkerId) -> bytes:
    return hashlib.blake2b(f"{family}\0{worker_id}".encode(), digest_size=8).digest()
