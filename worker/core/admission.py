"""Where a queued request would begin: what of it is cached, what it would take, and whether waiting pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.core import plan as plans
from worker.core.config import ReusePolicy
from worker.core.live import Live, Stage
from worker.core.outputs import Rejection
from worker.core.paths import newly_held
from worker.core.replica import Replica
from worker.core.retentions import worth_of
from worker.core.runs import NOTHING, Match, PartMatch
from worker.core.types import Phase, TokenIds


@dataclass(frozen=True, slots=True)
class Place:
    """`tokens`: all that is known of the request. `part`: the block behind `match` whose page is copied, if one is.

    `cost`: by how many pages fewer are available once all of `tokens` have theirs. `num_cold`: blocks of the match that
    have to come back from colder tiers.
    """

    tokens: TokenIds
    match: Match
    part: PartMatch | None
    cost: int
    num_cold: int = 0


class Admission:
    """Reads the replica of rank 0; changes nothing."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._block = replica.config.tokens_per_block

    def refusal(self, prompt_tokens: int) -> Rejection | None:
        """Why a prompt of this length can never run."""
        if prompt_tokens == 0:
            return Rejection("INVALID_ARGUMENT", "the prompt is empty", retryable=False)
        capacity = self._replica.config.num_pages * self._block
        if prompt_tokens > capacity:
            message = f"the prompt has {prompt_tokens} tokens, and this worker's cache holds {capacity}"
            return Rejection("INVALID_ARGUMENT", message, retryable=False)
        return None

    def place(self, live: Live, room: int) -> Place:
        """A page is copied only if that, too, leaves `cost` within `room`."""
        cache = self._replica.cache
        tokens = live.tokens
        # Of a prompt that must yield logits, the last token is computed even where all of it is cached.
        usable = len(live.request.token_ids) if live.pulls else len(tokens) - 1
        match = NOTHING
        if not live.request.bypass_prefix_cache:
            match = cache.match(live.request.salt, tokens, usable // self._block)
        num_cold = cache.num_cold(match)
        needed = -(-len(tokens) // self._block) - match.blocks + num_cold
        # What is copied is copied in this plan: a request that waits for its path has no page to copy it to.
        if not live.pulls and cache.is_loaded(match):
            part = cache.match_within(match, tokens[match.blocks * self._block : usable])
            if part is not None:
                cost = needed + newly_held(part.run, part.index + 1)
                if cost <= room:
                    return Place(tokens, match, part, cost)
        return Place(tokens, match, None, needed + newly_held(match.run, match.length), num_cold)

    def sibling_is_ahead(self, live: Live, place: Place, others: Iterable[Live]) -> bool:
        """Whether another prefill, which may wait for its cached blocks yet, is about to commit the block that `live`
        would compute next."""
        start = place.match.blocks * self._block
        stop = start + self._block
        block = place.tokens[start:stop]
        if not self._replica.config.enable_block_reuse or live.request.bypass_prefix_cache or len(block) < self._block:
            return False
        for other in others:
            if other.stage not in (Stage.PREFILL, Stage.LOADING) or other.pulls:
                continue
            if other.request.salt != live.request.salt:
                continue
            sequence = self._replica.sequences[other.request.key]
            if sequence.committed != place.match.blocks or stop > min(sequence.length, sequence.commit_until):
                continue
            hold, match = sequence.hold, place.match
            same_path = hold.run is match.run and hold.length == match.length
            if same_path and (sequence.token_slice(start, stop) == block).all():
                return True
        return False

    def act(self, live: Live, place: Place) -> plans.Admit:
        """By which every rank admits `live` at `place`."""
        request, match, part = live.request, place.match, place.part
        matched = match.blocks * self._block
        config = self._replica.config
        per_request = config.policy is ReusePolicy.PER_REQUEST
        return plans.Admit(
            key=request.key,
            scope=request.salt,
            run=match.run.number if match.run is not None else 0,
            length=match.length,
            matched=matched,
            token_ids=plans.pack((request.token_ids if live.pulls else place.tokens)[matched:]),
            commit_until=len(request.token_ids) if per_request else config.num_pages * self._block,
            copy=(part.run.number, part.index, part.tokens) if part is not None else None,
            conversation=request.conversation,
            parent=request.parent,
            prefills=request.phase is not Phase.GENERATION and len(live.output) == request.resumed_tokens,
            resumed=live.started,
            worth=worth_of(request.retention, len(request.token_ids) - request.resumed_tokens, self._block),
            turn=request.turn,
            prompt_hash=request.prompt_hash,
        )

    def reserve(self, lives: Iterable[Live]) -> int:
        """Pages that those that run are going to need: for what is known, and one each for what they will say."""
        reserve = 0
        for live in lives:
            if not live.is_running:
                continue
            sequence = self._replica.sequences[live.request.key]
            reserve += 1
            if live.stage is not Stage.PULLING:
                reserve += sequence.pages_needed(sequence.length, self._block)
            if live.stage is Stage.LOADING:
                reserve += self._replica.cache.num_cold(sequence.hold)
        return reserve

    def may_resume(self, cost: int, lives: Iterable[Live], max_util: float) -> bool:
        """A suspended request comes back only where others would not have to go for it at once."""
        if not any(live.is_running for live in lives):
            return True
        return self._replica.cache.num_in_use + cost <= max_util * self._replica.config.num_pages
