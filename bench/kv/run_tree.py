"""Drives a rank's own manager as the scheduler does, one request at a time, with every feature on."""

from __future__ import annotations

import msgspec
import numpy as np

from bench.kv.laps import Int32s, Laps, Part, Turn
from worker.core import plan as plans
from worker.core.admission import Admission, Place
from worker.core.batches import ChunkOf, batch_of
from worker.core.config import CacheConfig, ReusePolicy
from worker.core.live import Live
from worker.core.replica import Replica
from worker.core.runs import Match
from worker.core.step_work import StepWork
from worker.core.tiers import CopyWork, Tier
from worker.core.types import Phase, Request, RequestKey, Retention, Sampling, Stopping, TokenRange

SCOPE = b"a tenant's salt"
CHUNK = 2048
KEPT = Retention((TokenRange(0, 4096, 60),))
"""A system prompt that is worth more than the rest."""
PLAN_MS = 30
DEMOTED = 1


class RunTree:
    """Salts, owners, lineage, priorities, three tiers, events and the digest are on.

    Copies between tiers end with the plan behind the one that began them.
    """

    def __init__(self, num_pages: int, tokens_per_block: int, *, num_host_pages: int = 0, num_disk_pages: int = 0):
        self.block = tokens_per_block
        self.replica = Replica(
            CacheConfig(
                num_pages=num_pages,
                tokens_per_block=tokens_per_block,
                policy=ReusePolicy.PER_CONVERSATION,
                num_host_pages=num_host_pages,
                num_disk_pages=num_disk_pages,
                finished_subagent_priority=DEMOTED,
                tells_events=True,
            )
        )
        self._admission = Admission(self.replica)
        self._keys = 0
        self._plans = 0
        self._copying: list[CopyWork] = []

    @property
    def num_blocks(self) -> int:
        return self.replica.cache.tree.num_blocks

    @property
    def num_runs(self) -> int:
        return sum(run.parent is not None for run in self.replica.cache.tree.runs())

    def match(self, prompt: Int32s) -> Match:
        return self.replica.cache.match(SCOPE, prompt, len(prompt) // self.block)

    def serve(self, turn: Turn, laps: Laps) -> int:
        """From its match to its release; returns how many of its tokens were cached."""
        live = self._live(turn)
        key = live.request.key
        laps.start()
        place = self._admission.place(live, self.replica.cache.num_available)
        laps.lap(Part.MATCH)
        self._begin(laps, Part.PLAN)
        self._act(self._admission.act(live, place))
        laps.lap(Part.RESERVE)
        self._onboard(key, laps)
        sequence = self.replica.sequences[key]
        cached = sequence.computed
        while left := sequence.length - sequence.computed:
            if sequence.returns:
                self._act(plans.Return(key))
            self._chunk(key, min(left, CHUNK), laps)
        if len(turn.answer):
            self._act(plans.Sampled((key,) * len(turn.answer), tuple(turn.answer.tolist())))
            laps.start()
            if len(turn.answer) > 1:
                self._chunk(key, len(turn.answer) - 1, laps)
        self._act(plans.Release(key))
        laps.lap(Part.RELEASE)
        self._finish()
        laps.lap(Part.PLAN)
        return cached

    def make_room(self, tokens: int) -> None:
        """Leave the pages of so many tokens free beyond those that are kept free, so that nothing is evicted for them.

        A request took them, and nothing of it was committed.
        """
        config = self.replica.config
        tokens += self.block * min(config.max_offload_pages_per_plan, config.num_pages // 16)
        live = self._live(Turn(np.full(tokens, -1, np.int32), ""))
        key = live.request.key
        place = Place(live.tokens, Match(None, 0, 0), None, 0)
        self._begin()
        self._act(msgspec.structs.replace(self._admission.act(live, place), commit_until=0))
        self._act(plans.Chunk(key, tokens, True))
        self._finish()
        self._begin()
        self._act(plans.Release(key))
        self._finish()

    def pass_time(self) -> None:
        """Until whatever has ended is idle for long enough to be demoted."""
        for _ in range(self.replica.config.finished_subagent_min_idle_iterations):
            self.rest()

    def begin_decoding(self, prompt: Int32s) -> RequestKey:
        """A request that stays, its prompt computed."""
        live = self._live(Turn(prompt, "decoding"))
        key = live.request.key
        place = self._admission.place(live, self.replica.cache.num_available)
        self._begin()
        self._act(self._admission.act(live, place))
        self._act(plans.Chunk(key, len(prompt) - place.match.blocks * self.block, True))
        self._finish()
        return key

    def decode(self, key: RequestKey) -> StepWork:
        """One step of a request that runs."""
        self._begin()
        self._act(plans.Sampled((key,), (7,)))
        self._act(plans.Chunk(key, 1, True))
        return self._finish()

    def end(self, key: RequestKey) -> None:
        self._begin()
        self._act(plans.Release(key))
        self._finish()

    def rest(self) -> None:
        """An empty plan."""
        self._begin()
        self._finish()

    def demote(self, conversation: str) -> int:
        """As when its parent returns; returns how many blocks were lowered."""
        return sum(one.blocks for one in self.replica.cache.demote(conversation, (), DEMOTED))

    def restore(self, conversation: str) -> None:
        self.replica.cache.restore(conversation)

    @property
    def num_free(self) -> int:
        return len(self.replica.cache.pools.free[Tier.DEVICE])

    def take(self, pages: int) -> None:
        """What chunks of so many blocks take; given back unused."""
        taken = self.replica.cache.take(pages)
        assert taken is not None, "more pages asked for than are idle"
        self.replica.cache.give(taken)

    def _live(self, turn: Turn) -> Live:
        """Its tokens are in the bytes that came over the wire, as a worker has them."""
        self._keys += 1
        request = Request(
            key=RequestKey(self._keys),
            phase=Phase.AGGREGATED,
            token_ids=np.frombuffer(turn.prompt.tobytes(), np.int32),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=1 << 20),
            salt=SCOPE,
            conversation=turn.conversation,
            parent=turn.parent,
            turn=str(self._keys),
            retention=KEPT,
        )
        return Live(request, self._keys)

    def _chunk(self, key: RequestKey, count: int, laps: Laps) -> None:
        """A plan's chunk, and the opening of the next plan, which commits it.

        The forward's batch, which closing a plan makes as well, is the model's and not the manager's: it is made once
        before, so that its memory is near, and once more behind, and what that takes is taken off.
        """
        sequence = self.replica.sequences[key]
        chunk = ChunkOf(sequence, sequence.computed, sequence.computed + count, True)
        self._act(plans.Chunk(key, count, chunk.stop == sequence.length))
        laps.lap(Part.RESERVE)
        batch_of([chunk], [], self.block)
        laps.start()
        self._finish()
        laps.lap(Part.PLAN)
        batch_of([chunk], [], self.block)
        laps.take_off(Part.PLAN)
        self._begin(laps, Part.COMMIT)

    def _onboard(self, key: RequestKey, laps: Laps) -> None:
        """Plan after plan until all that was found can be read."""
        cache, sequence = self.replica.cache, self.replica.sequences[key]
        while sequence.loading:
            num_cold = cache.num_cold(sequence.hold)
            if cache.is_loaded(sequence.hold):
                self._act(plans.Loaded(key))
                break
            count = min(num_cold, cache.pools.onboard_left, cache.num_available)
            if count:
                self._act(plans.Load(key, count))
            self._finish()
            self._begin()
        laps.lap(Part.ONBOARD)

    def _begin(self, laps: Laps | None = None, part: Part = Part.PLAN) -> None:
        """Opening a plan is `part`; hearing of copies that have ended is PLAN."""
        laps = laps or Laps()
        self._plans += 1
        self.replica.begin(self._plans, self._plans * PLAN_MS)
        laps.lap(part)
        for copy in self._copying:
            self._act(plans.Copied(copy.number, len(copy.sources)))
        self._copying = []
        laps.lap(Part.PLAN)

    def _finish(self) -> StepWork:
        work = self.replica.finish()
        self._copying = work.copies
        return work

    def _act(self, act: plans.AnyAct) -> None:
        done = self.replica.act(act)
        assert done, "the bench asked for more than there is"
