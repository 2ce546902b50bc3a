"""One rank's state, and the acts that change it. Every rank holds one; the same acts give the same state.

Each act adds what it decided to a rolling digest, which the ranks compare: pages taken, evicted, freed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from worker.core import plan as plans
from worker.core.arrays import Growing, Int32s
from worker.core.cache import Cache, CacheConfig
from worker.core.plan import Plan
from worker.core.runs import NOTHING, Match
from worker.core.sequences import Sequence
from worker.core.types import Batch, RequestKey

REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Decision:
    """What one act decided, for the day two ranks differ."""

    plan: int
    act: str
    key: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullWork:
    """Fill `pages` with blocks `first_block` and following of the session `source`."""

    request: RequestKey
    source: bytes
    first_block: int
    pages: Int32s


@dataclass(frozen=True, slots=True)
class PinWork:
    """From the end of this step's forward, `pages` hold the first `num_tokens` tokens of this request for whoever
    presents its session's secret."""

    request: RequestKey
    pages: Int32s
    num_tokens: int


@dataclass(slots=True)
class StepWork:
    """What one plan asks of a rank besides its own bookkeeping. `unpins`: these pins are over."""

    batch: Batch | None = None
    pulls: list[PullWork] = field(default_factory=list)
    pins: list[PinWork] = field(default_factory=list)
    unpins: list[RequestKey] = field(default_factory=list)


class Replica:
    """Followers `apply` whole plans. Rank 0's scheduler calls `begin`, `act` for each act, then `finish`."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.cache = Cache(config)
        self.sequences: dict[RequestKey, Sequence] = {}
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self.digest = b""
        self._hash = hashlib.blake2b(digest_size=16)
        self._number = 0
        self._work = StepWork()
        self._chunks: list[tuple[Sequence, int, bool]] = []
        self._in_step: set[RequestKey] = set()

    def apply(self, plan: Plan) -> StepWork:
        self.begin(plan.number)
        for act in plan.acts:
            done = self.act(act)
            assert done, f"plan {plan.number}: rank 0 had pages for {act} and this rank has not"
        return self.finish()

    def begin(self, number: int) -> None:
        """The last step's chunks are computed: what they filled is committed."""
        self._number = number
        self.cache.tree.begin(number)
        self._work = StepWork()
        for sequence, _, _ in self._chunks:
            if sequence.key in self.sequences:
                self._commit(sequence)
        self._chunks = []
        self._in_step.clear()

    def in_step(self, key: RequestKey) -> bool:
        """Whether a chunk of this request is in the plan that is being made."""
        return key in self._in_step

    def act(self, act: plans.AnyAct) -> bool:
        """Carry out one act. False: it needs pages that are not to be had, and nothing changed."""
        match act:
            case plans.Chunk():
                return self._chunk(act)
            case plans.Sampled():
                self._append_sampled(act)
            case plans.Admit():
                self._admit(act)
            case plans.Pull():
                return self._pull(act)
            case plans.Arrived():
                self._arrive(act)
            case plans.Pin():
                self._pin(act)
            case plans.Release():
                self._release(act)
            case plans.Clear():
                self._decide("clear", 0, self.cache.clear())
        return True

    def finish(self) -> StepWork:
        """Close the plan: the batch of its chunks, and the digest of its decisions."""
        self.digest = self._hash.digest()
        self._work.batch = self._batch()
        return self._work

    def _decide(self, act: str, key: int, *pages: Int32s) -> None:
        joined = pages[0] if len(pages) == 1 else np.concatenate(pages)
        self._hash.update(f"{self._number} {act} {key} {len(joined)}".encode())
        self._hash.update(joined.tobytes())
        self.decisions.append(Decision(self._number, act, key, tuple(joined.tolist())))

    def _append_sampled(self, act: plans.Sampled) -> None:
        for key, token in zip(act.keys, act.token_ids, strict=True):
            sequence = self.sequences.get(RequestKey(key))
            if sequence is not None:
                sequence.tokens.append(token)

    def _admit(self, act: plans.Admit) -> None:
        tree = self.cache.tree
        match = Match(tree.run(act.run), act.length, 0) if act.run else NOTHING
        hold = tree.hold(act.scope, match)
        pages = tree.path_pages(hold)
        key = RequestKey(act.key)
        self.sequences[key] = Sequence(
            key=key,
            hold=hold,
            base=act.matched,
            tokens=Growing(plans.unpack(act.token_ids)),
            pages=Growing(pages),
            commit_until=act.commit_until,
            computed=act.matched,
            committed=len(pages),
        )
        self._decide("admit", act.key, pages)

    def _take(self, sequence: Sequence, until: int, act: str) -> bool:
        """Pages for positions [0, until)."""
        needed = sequence.pages_needed(until, self.config.tokens_per_block)
        if needed:
            result = self.cache.take(needed)
            if result is None:
                return False
            taken, evicted = result
            sequence.pages.extend(taken)
            self._decide(act, sequence.key, taken, evicted)
        return True

    def _chunk(self, act: plans.Chunk) -> bool:
        sequence = self.sequences[RequestKey(act.key)]
        if not self._take(sequence, sequence.computed + act.count, "chunk"):
            return False
        sequence.computed += act.count
        self._chunks.append((sequence, act.count, act.sample))
        self._in_step.add(sequence.key)
        return True

    def _pull(self, act: plans.Pull) -> bool:
        sequence = self.sequences[RequestKey(act.key)]
        if not self._take(sequence, sequence.length, "pull"):
            return False
        pages = sequence.pages.view[sequence.committed :].copy()
        if len(pages):
            self._work.pulls.append(PullWork(sequence.key, act.source, sequence.committed, pages))
        return True

    def _arrive(self, act: plans.Arrived) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        sequence.computed = sequence.length
        self._commit(sequence)

    def _commit(self, sequence: Sequence) -> None:
        committed = sequence.committed
        free = self.cache.commit(sequence)
        if sequence.pinned:
            sequence.spare.extend(free)
        else:
            self.cache.give(free)
        if sequence.committed != committed:
            self._decide("commit", sequence.key, sequence.pages.view[committed : sequence.committed], free)

    def _pin(self, act: plans.Pin) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        sequence.pinned = True
        pages = sequence.pages.view[: -(-sequence.computed // self.config.tokens_per_block)].copy()
        self._work.pins.append(PinWork(sequence.key, pages, sequence.computed))

    def _release(self, act: plans.Release) -> None:
        sequence = self.sequences.pop(RequestKey(act.key))
        self._decide("release", act.key, sequence.pages.view[sequence.committed :])
        self.cache.release(sequence)
        if sequence.pinned:
            self._work.unpins.append(sequence.key)

    def _batch(self) -> Batch | None:
        """This plan's chunks as one forward's input."""
        if not self._chunks:
            return None
        block = self.config.tokens_per_block
        spans = [(sequence, sequence.computed - count, sequence.computed) for sequence, count, _ in self._chunks]
        starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum([stop - start for _, start, stop in spans], out=starts[1:])
        widths = [-(-stop // block) for _, _, stop in spans]
        table = np.full((len(spans), max(widths)), -1, np.int32)
        for row, ((sequence, _, _), width) in enumerate(zip(spans, widths, strict=True)):
            table[row, :width] = sequence.pages.view[:width]
        sampled = [row for row, (_, _, sample) in enumerate(self._chunks) if sample]
        return Batch(
            token_ids=np.concatenate([sequence.token_slice(start, stop) for sequence, start, stop in spans]),
            positions=np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in spans]),
            slots=np.concatenate([sequence.slots(start, stop, block) for sequence, start, stop in spans]),
            query_starts=starts,
            context_lens=np.array([stop for _, _, stop in spans], np.int32),
            page_table=table,
            sample_rows=starts[1:][sampled] - 1,
            sample_requests=tuple(spans[row][0].key for row in sampled),
        )

    def check(self) -> None:
        """Every page is in exactly one place, and counts add up."""
        cache, tree = self.cache, self.cache.tree
        tree.check()
        owned = [
            int(page)
            for sequence in self.sequences.values()
            for page in (*sequence.pages.view[sequence.committed :], *sequence.spare.view)
        ]
        committed = [int(page) for run in tree.runs() for page in run.pages.view]
        places = owned + committed + cache.free_pages()
        assert sorted(places) == list(range(self.config.num_pages)), "a page is in two places, or in none"
        for sequence in self.sequences.values():
            path = tree.path_pages(sequence.hold)
            assert np.array_equal(path, sequence.pages.view[: sequence.committed]), (
                "a request reads pages it does not hold"
            )
            assert (
                sequence.base <= sequence.committed * self.config.tokens_per_block or not self.config.enable_block_reuse
            )
            assert sequence.computed <= sequence.pages.size * self.config.tokens_per_block, "tokens without pages"
        holds = sum(len(run.holds) for run in tree.runs())
        assert holds == len(self.sequences), "a hold that belongs to nobody"
