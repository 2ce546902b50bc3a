"""Which workers serve a turn: filter, score, pick; and why, for the receipt.

Families go to workers by rendezvous hashing (Thaler and Ravishankar, 1998), so replicas agree without talking and a
worker that comes or goes moves only its own families. Load is bounded (after Mirrokni, Thorup and Zadimoghaddam, 2018):
a worker above `load_bound` times the mean passes a family on, within the first `spill_depth` workers of its order.
Among those that are not above it, the one whose cache holds clearly more of the prompt comes before the favourite; with
`kv_cache_aware` any more is enough. Caches are known by their events, which all replicas get; of a worker that sends
none, `kv_cache_aware` and the limit of local prefills go by what this edge has sent it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edge.core.capabilities import NO_NEEDS, Needs
from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet, Role, Worker
from edge.core.life_events import Phase
from edge.core.prefix_index import PrefixIndex
from edge.core.prompt_keys import Prompt, PromptKeys
from edge.core.resident import Prints
from edge.core.types import FamilyKey, Lineage, WorkerId
from enginelink.block_keys import TOKEN_BYTES

RouterType = Literal["conversation", "kv_cache_aware", "load_balancing", "round_robin"]
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`min_bound`: a worker with fewer requests is never above its bound, however idle the others are.
    `max_local_prefill_tokens`: a prompt with at most this many tokens that are not known to be cached goes to the
    generation worker alone; 0 is never. `clear_gain_tokens`: so much more of a prompt is clearly more."""

    type: RouterType = "conversation"
    spill_depth: int = 4
    load_bound: float = 1.25
    min_bound: int = 1
    max_local_prefill_tokens: int = 0
    clear_gain_tokens: int = 1024
    subagent_affinity_scope: Literal["context", "both"] = "context"


@dataclass(frozen=True, slots=True)
class Placement:
    """`context` None: the generation worker does both phases. `reasons`: a line for each choice."""

    context: WorkerId | None
    generation: WorkerId
    reasons: tuple[str, ...]


@dataclass(slots=True)
class _Asked:
    """A turn to be placed. Its blocks' fingerprints are computed when they are first needed."""

    lineage: Lineage
    prompt: Prompt | None
    prints: dict[int, Prints] = field(default_factory=dict)


class Router:
    """Places turns on the ready workers of `fleet`."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._turns = {role: itertools.count() for role in (Role.CONTEXT, Role.GENERATION)}
        self._prefixes = PrefixIndex()
        self._keys = PromptKeys()

    def place(
        self,
        lineage: Lineage,
        prompt_tokens: int,
        *,
        prompt: Prompt | None = None,
        avoid: Collection[WorkerId] = (),
        needs: Needs = NO_NEEDS,
    ) -> Placement:
        """`prompt`: without it, caches are not looked into. `avoid`: workers that failed this turn; they are used only
        where there is no other. `needs`: what the turn asks for that not every engine has.

        Raises EdgeError OVERLOADED where a phase has no ready worker, or none whose connector fits; INVALID where no
        worker has what it needs.
        """
        asked = _Asked(lineage, prompt)
        contexts = [one for one in self._fleet.usable(Role.CONTEXT) if needs.lacking(one.can) is None]
        generation, why_generation = self._choose(
            Role.GENERATION,
            self._generation_family(lineage),
            avoid,
            asked,
            needs=needs,
            fits=lambda worker: not contexts or _is_alone(worker) or _gives(contexts, worker) or _can_prefill(worker),
        )
        local = self._local_prefill(asked, prompt_tokens, generation) if _can_prefill(generation) else None
        if local is not None:
            return Placement(None, generation.worker_id, (why_generation, local))
        if _is_alone(generation) or (contexts and not _gives(contexts, generation)):
            self._prefixes.note(lineage.conversation, generation, prompt_tokens)
            why = "one worker for both phases" if _is_alone(generation) else "no context worker's connector fits"
            return Placement(None, generation.worker_id, (why_generation, why))
        context, why_context = self._choose(
            Role.CONTEXT,
            lineage.family,
            avoid,
            asked,
            needs=needs,
            fits=lambda worker: worker.can.hands_over_to(generation.can),
        )
        self._prefixes.note(lineage.conversation, context, prompt_tokens)
        return Placement(context.worker_id, generation.worker_id, (why_context, why_generation))

    def context_for(
        self, lineage: Lineage, prompt_tokens: int, *, prompt: Prompt, needs: Needs = NO_NEEDS
    ) -> tuple[WorkerId, str]:
        """Where a prefill goes whose answer somebody else places. Raises EdgeError as `place`."""
        worker, why = self._choose(
            Role.CONTEXT,
            lineage.family,
            (),
            _Asked(lineage, prompt),
            needs=needs,
            fits=lambda worker: Phase.CONTEXT in worker.can.phases,
        )
        self._prefixes.note(lineage.conversation, worker, prompt_tokens)
        return worker.worker_id, why

    def generation_for(
        self, lineage: Lineage, *, connector: str, avoid: Collection[WorkerId] = (), needs: Needs = NO_NEEDS
    ) -> tuple[WorkerId, str]:
        """A generation worker that takes what `connector` hands over. Raises EdgeError as `place`."""
        worker, why = self._choose(
            Role.GENERATION,
            self._generation_family(lineage),
            avoid,
            needs=needs,
            fits=lambda worker: Phase.GENERATION in worker.can.phases and worker.can.connector == connector,
        )
        return worker.worker_id, why

    def _generation_family(self, lineage: Lineage) -> FamilyKey:
        """What the answer is placed by. With scope `context`, relatives come together where prompts are prefilled, and
        each conversation keeps a generation worker of its own choice."""
        if self._config.subagent_affinity_scope == "both" or any(map(_is_alone, self._fleet.usable(Role.GENERATION))):
            return lineage.family
        return FamilyKey(lineage.conversation)

    def served(self, lineage: Lineage, generation: WorkerId, tokens: int) -> None:
        """The generation worker has the first `tokens` tokens of this conversation now."""
        self._prefixes.note(lineage.conversation, self._fleet.workers[generation], tokens)

    def may_hold_children(self, lineage: Lineage, served_by: WorkerId) -> list[WorkerId]:
        """The context workers that must hear that `served_by` serves a turn of this conversation: any replica may have
        placed a child of it there, and finished children are demoted where they are.

        A child is placed by the root of its family where its requests carry that, else by this conversation.
        """
        usable = self._fleet.usable(Role.CONTEXT)
        families = [lineage.family]
        if lineage.depth < 2:
            families.append(FamilyKey(lineage.conversation))
        order = [one for family in families for one in rendezvous_order(family, usable)[: self._config.spill_depth]]
        return [worker_id for worker_id in dict.fromkeys(one.worker_id for one in order) if worker_id != served_by]

    def _local_prefill(self, asked: _Asked, prompt_tokens: int, generation: Worker) -> str | None:
        limit = self._config.max_local_prefill_tokens
        if limit == 0:
            return None
        cached = 0
        if prompt_tokens > limit:
            held = self._held(asked, generation)
            cached = self._prefixes.tokens(asked.lineage.conversation, generation) if held is None else held
        rest = max(0, prompt_tokens - cached)
        return f"prefill of {rest} tokens is short: generation worker alone" if rest <= limit else None

    def _choose(
        self,
        role: Role,
        family: FamilyKey,
        avoid: Collection[WorkerId],
        asked: _Asked | None = None,
        *,
        needs: Needs,
        fits: Callable[[Worker], bool],
    ) -> tuple[Worker, str]:
        phase = "context" if role is Role.CONTEXT else "generation"
        usable = self._fleet.usable(role)
        if not usable:
            message = f"No {phase} worker is ready."
            raise EdgeError(Code.OVERLOADED, message, retryable=True, retry_after_s=RETRY_AFTER_S)
        able = [worker for worker in usable if needs.lacking(worker.can) is None]
        if not able:
            lacking = needs.lacking(usable[0].can)
            raise EdgeError(Code.INVALID, f"{lacking}: no engine here serves it.", param=lacking, reason="not served")
        usable = [worker for worker in able if fits(worker)]
        if not usable:
            message = f"No ready {phase} worker's KV connector fits the other phase's."
            raise EdgeError(Code.OVERLOADED, message, retryable=True, retry_after_s=RETRY_AFTER_S)
        candidates = [worker for worker in usable if worker.worker_id not in avoid] or usable
        match self._config.type:
            case "round_robin":
                worker = candidates[next(self._turns[role]) % len(candidates)]
                return worker, f"{phase} {worker.worker_id}: its turn"
            case "load_balancing":
                worker = min(candidates, key=lambda one: (one.load, one.worker_id))
                return worker, f"{phase} {worker.worker_id}: least load ({worker.load})"
            case "conversation" | "kv_cache_aware":
                return self._by_family(phase, family, candidates, asked)

    def _by_family(
        self, phase: str, family: FamilyKey, candidates: Sequence[Worker], asked: _Asked | None
    ) -> tuple[Worker, str]:
        order, bound = self._order(family, candidates)
        within = [worker for worker in order if worker.load < bound]
        if not within:
            worker = min(order, key=lambda one: one.load)
            why = f"least load of the family's first {len(order)}, all above {bound}"
            return worker, f"{phase} {worker.worker_id}: {why}"
        if asked is not None and len(order) > 1:
            found = self._by_cache(asked, within)
            if found is not None:
                worker, why = found
                return worker, f"{phase} {worker.worker_id}: {why}, choice {order.index(worker) + 1}"
        worker = within[0]
        rank = order.index(worker)
        passed = f", {rank} above the bound of {bound}" if rank else ""
        return worker, f"{phase} {worker.worker_id}: choice {rank + 1} of the family{passed}"

    def _by_cache(self, asked: _Asked, within: Sequence[Worker]) -> tuple[Worker, str] | None:
        """Who holds most of the prompt, and that; None where that is not reason enough to leave the first."""
        if self._config.type == "conversation":
            return self._clearly_more(asked, within)
        known = [(worker, *self._known(asked, worker)) for worker in within]
        worker, tokens, how = max(known, key=lambda one: one[1])
        return (worker, f"{how} {tokens} tokens of it") if tokens else None

    def _clearly_more(self, asked: _Asked, within: Sequence[Worker]) -> tuple[Worker, str] | None:
        gain = self._config.clear_gain_tokens
        if asked.prompt is None or len(within) == 1 or len(asked.prompt.token_ids) < TOKEN_BYTES * gain:
            return None
        favourite = self._held(asked, within[0])
        if favourite is None:
            return None
        held = [(worker, self._held(asked, worker) or 0) for worker in within]
        worker, tokens = max(held, key=lambda one: one[1])
        return (worker, f"holds {tokens} tokens of it") if tokens >= favourite + gain else None

    def _known(self, asked: _Asked, worker: Worker) -> tuple[int, str]:
        """Tokens of the prompt that the worker holds; where that is not known, of the conversation that it was sent, or
        of its parent where it was sent none of its own. And which of these it is."""
        held = self._held(asked, worker)
        if held is not None:
            return held, "holds"
        lineage = asked.lineage
        own = self._prefixes.tokens(lineage.conversation, worker)
        sent = own if own or lineage.parent is None else self._prefixes.tokens(lineage.parent, worker)
        return sent, "was sent"

    def _held(self, asked: _Asked, worker: Worker) -> int | None:
        """Tokens of the prompt that are in the worker's cache; None where that is not known."""
        block = worker.tokens_per_block
        if asked.prompt is None or not block or not self._fleet.kv.is_known(worker.worker_id):
            return None
        prints = asked.prints.get(block)
        if prints is None:
            prints = asked.prints[block] = self._keys.prints(asked.lineage, asked.prompt, block)
        blocks = self._fleet.kv.known_blocks(worker.worker_id, prints)
        return None if blocks is None else blocks * block

    def _order(self, family: FamilyKey, candidates: Sequence[Worker]) -> tuple[list[Worker], int]:
        """Where the family may go, its favourite first, and the load from which on a worker passes it on."""
        mean = (sum(worker.load for worker in candidates) + 1) / len(candidates)
        order = rendezvous_order(family, candidates)[: self._config.spill_depth]
        return order, max(self._config.min_bound, math.ceil(self._config.load_bound * mean))


def _is_alone(worker: Worker) -> bool:
    """The configuration has it do both phases."""
    return Role.CONTEXT in worker.role


def _can_prefill(worker: Worker) -> bool:
    return Phase.AGGREGATED in worker.can.phases


def _gives(contexts: Sequence[Worker], generation: Worker) -> bool:
    return any(one.can.hands_over_to(generation.can) for one in contexts)


def rendezvous_order(family: FamilyKey, workers: Sequence[Worker]) -> list[Worker]:
    """All workers, the family's favourite first; the same on every replica."""
    return sorted(workers, key=lambda worker: _weight(family, worker.worker_id), reverse=True)


def _weight(family: FamilyKey, worker_id: WorkerId) -> bytes:
    return hashlib.blake2b(f"{family}\0{worker_id}".encode(), digest_size=8).digest()
