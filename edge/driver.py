"""Runs turns: feeds each its events, performs the effects, and watches the deadlines.

Everything happens on the event loop, synchronously; a turn has no task of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from edge.core.capabilities import needs_of
from edge.core.errors import EdgeError
from edge.core.fleet import Fleet
from edge.core.life_events import (
    CallerGone,
    CallerStopped,
    CancelLeg,
    DeadlinePassed,
    Effect,
    Event,
    KvArrived,
    LegFailed,
    LegFinished,
    NotPlaced,
    Phase,
    Place,
    Placed,
    Prefilled,
    SendEnded,
    SendGenerating,
    Started,
    SubmitLeg,
    TellFailed,
    TellFinished,
    TellStarted,
    TellTokens,
    Tokens,
)
from edge.core.lifecycle import Deadlines, RequestLife
from edge.core.prompt_keys import Prompt
from edge.core.routing import Placement, Router
from edge.core.types import FinishReason, Receipt, TokenLogprob, Turn, Usage, WorkerId
from edge.ended import EndedTurn, EndListener
from edge.legs import Connection, order_of
from edge.pins import Pins

WATCH_EVERY_S = 0.25
MAX_RECEIPTS = 1024


class Sink(Protocol):
    """Whoever asked for a turn. Called on the event loop; `finished` or `failed` comes once, last.

    It may call `Running.stop` or `Running.cancel` from within; nothing is told after that. `judged` comes before
    `finished`, where a worker ended the answer, and never twice.
    """

    def started(self, cached_tokens: int) -> None: ...
    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None: ...
    def judged(self, reason: FinishReason) -> FinishReason:
        """How the answer ended, by its text: no worker sees that it calls tools."""

    def finished(self, reason: FinishReason, usage: Usage) -> None: ...
    def failed(self, error: EdgeError) -> None: ...


class OnItsWay(Protocol):
    """What the driver watches until it is over."""

    tenant: str

    def watch(self, now_s: float) -> None: ...
    def stop(self, reason: FinishReason) -> None:
        """End it; its sink hears `finished` with that reason within this call."""


class Driver:
    """`run` watches deadlines and keeps the connections; `start` begins a turn."""

    def __init__(
        self, fleet: Fleet, router: Router, connections: Iterable[Connection], deadlines: Deadlines | None = None
    ) -> None:
        self.fleet = fleet
        self.router = router
        self.connections: Mapping[WorkerId, Connection] = {one.worker_id: one for one in connections}
        self.deadlines = deadlines or Deadlines()
        self.running: set[OnItsWay] = set()
        self.pins = Pins()
        self.receipts: deque[tuple[str, Receipt]] = deque(maxlen=MAX_RECEIPTS)
        """Turn id and receipt of the turns that ended last."""
        self.end_listeners: list[EndListener] = []
        """Hear of every turn that ends. Empty unless somebody records."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for connection in self.connections.values():
                tasks.create_task(connection.run())
            tasks.create_task(self._watch())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for running in list(self.running):
                running.watch(loop.time())
            self.pins.expire(loop.time())

    def start(self, turn: Turn, sink: Sink) -> Running:
        """The answer comes to `sink`, the first of it not before this returns."""
        running = Running(self, turn, sink)
        self.running.add(running)
        asyncio.get_running_loop().call_soon(running.begin)
        return running

    def abort(self, tenant: str | None) -> int:
        """End all that a tenant has here, or everybody, pinned pages too; returns how much that was."""
        found = [running for running in self.running if tenant in (None, running.tenant)]
        for running in found:
            running.stop(FinishReason.CANCELLED)
        return len(found) + self.pins.abort_all(tenant)

    def tell_returned(self, turn: Turn, served_by: WorkerId) -> None:
        """Its prefill began: whoever else may hold finished children of this conversation hears that it returned."""
        for worker in self.router.may_hold_children(turn.lineage, served_by):
            self.connections[worker].returned(turn.lineage, turn.turn_id, turn.principal.tenant)

    @property
    def model_ready(self) -> bool:
        return self.fleet.can_serve

    @property
    def max_context_length(self) -> int:
        """Tokens of a prompt with its answer that every ready worker can hold; 0 while none is ready."""
        return self.fleet.max_context_length


class Running:
    """One turn on its way."""

    def __init__(self, driver: Driver, turn: Turn, sink: Sink) -> None:
        self.receipt = Receipt(family=turn.lineage.family, conversation=turn.lineage.conversation)
        self.tenant = turn.principal.tenant
        self._driver = driver
        self._turn = turn
        self._sink = sink
        self._life = RequestLife(turn.prompt_tokens, turn.stops.max_tokens)
        self._legs: dict[int, tuple[Connection, int, _Leg]] = {}
        self._loop = asyncio.get_running_loop()
        self._began_s = self._since_s = self._loop.time()
        self._reason: FinishReason | None = None
        self._telling = True

    def begin(self) -> None:
        if not self._life.over:
            self._perform(self._life.begin())

    def cancel(self) -> None:
        """Nobody listens any more: nothing is told from here on."""
        self._telling = False
        self.feed(CallerGone())

    def stop(self, reason: FinishReason) -> None:
        """The caller's side ended the answer. `finished` comes, within this call."""
        self.feed(CallerStopped(reason))

    def feed(self, event: Event) -> None:
        self._perform(self._life.feed(event))

    def watch(self, now_s: float) -> None:
        limit_s = self._driver.deadlines.of(self._life.state)
        if limit_s is not None and now_s - self._since_s > limit_s:
            self.feed(DeadlinePassed(self._life.state))

    def _perform(self, effects: Sequence[Effect]) -> None:
        self._since_s = self._loop.time()
        for effect in effects:
            match effect:
                case TellTokens() | TellStarted() | TellFinished() | TellFailed():
                    self._tell(effect)
                case Place():
                    self._place(effect)
                case SubmitLeg():
                    # A sink that was told the tokens before this may have ended the turn.
                    if not self._life.over:
                        self._submit(effect)
                case CancelLeg():
                    self._cancel(effect.leg)
                case SendGenerating():
                    self._driver.connections[effect.worker].generating(self._turn.lineage.conversation)
                case SendEnded():
                    lineage = self._turn.lineage
                    connection = self._driver.connections[effect.worker]
                    reason = self._judged(effect.reason)
                    connection.ended(lineage.conversation, reason, final=lineage.final and reason is not None)
        if self._life.over:
            self._over()

    def _judged(self, reason: FinishReason | None) -> FinishReason | None:
        """As its sink judges it, once; None stays None."""
        if reason is not None and self._reason is None:
            self._reason = self._sink.judged(reason) if self._telling else reason
        return None if reason is None else self._reason

    def _tell(self, effect: TellTokens | TellStarted | TellFinished | TellFailed) -> None:
        if isinstance(effect, TellFinished):
            self._judged(effect.reason)
        if isinstance(effect, TellFinished) and self.receipt.generation_worker:
            tokens = effect.usage.prompt_tokens + effect.usage.completion_tokens
            self._driver.router.served(self._turn.lineage, WorkerId(self.receipt.generation_worker), tokens)
        if isinstance(effect, TellStarted):
            self._driver.tell_returned(self._turn, WorkerId(self.receipt.context_worker))
        if not self._telling:
            return
        match effect:
            case TellTokens():
                self._sink.tokens(effect.token_ids, effect.logprobs)
            case TellStarted():
                self._sink.started(effect.cached_tokens)
            case TellFinished():
                self._telling = False
                self._sink.finished(effect.reason, effect.usage)
            case TellFailed():
                self._telling = False
                self._sink.failed(effect.error)

    def _place(self, effect: Place) -> None:
        self.receipt.attempts += 1
        router, lineage = self._driver.router, self._turn.lineage
        try:
            if effect.generation_only:
                connector = self._driver.fleet.workers[WorkerId(self.receipt.context_worker)].can.connector
                generation, why = router.generation_for(
                    lineage, connector=connector, avoid=effect.avoid, needs=needs_of(self._turn)
                )
                placement = Placement(None, generation, (why,))
            else:
                turn = self._turn
                prompt = Prompt(turn.token_ids, turn.cache_salt.hex().encode())
                placement = router.place(
                    lineage, turn.prompt_tokens, prompt=prompt, avoid=effect.avoid, needs=needs_of(turn)
                )
                self.receipt.context_worker = placement.context or placement.generation
        except EdgeError as error:
            self.feed(NotPlaced(error))
            return
        self.receipt.generation_worker = placement.generation
        self.receipt.reasons.extend(placement.reasons)
        self.feed(Placed(placement.context, placement.generation))

    def _submit(self, effect: SubmitLeg) -> None:
        order = order_of(self._turn, effect.leg, effect.phase, kv_session=effect.kv_session, resumed=effect.resumed)
        connection = self._driver.connections[effect.worker]
        leg = _Leg(self, effect.leg, effect.worker)
        self._driver.fleet.began(effect.worker)
        self._legs[effect.leg] = (connection, connection.submit(order, leg), leg)

    def _cancel(self, number: int) -> None:
        entry = self._legs.pop(number, None)
        if entry is not None:
            connection, handle, leg = entry
            connection.cancel(handle)
            self.unload(leg)

    def unload(self, leg: _Leg) -> None:
        """The leg is no load on its worker any more."""
        if leg.loads:
            leg.loads = False
            self._driver.fleet.ended(leg.worker)

    def forget(self, leg: _Leg) -> None:
        self._legs.pop(leg.number, None)
        self.unload(leg)

    def _over(self) -> None:
        if self in self._driver.running:
            self._driver.running.discard(self)
            self._driver.receipts.append((self._turn.turn_id, self.receipt))
            for leg in [leg for _, _, leg in self._legs.values()]:
                self._cancel(leg.number)
            for listener in self._driver.end_listeners:
                sent = len(self._life.sent)
                now_s = self._loop.time()
                listener.ended(EndedTurn(self._turn, Phase.AGGREGATED, self._began_s, now_s, self._reason, sent))


class _Leg:
    """Turns what a connection tells into the life's events."""

    __slots__ = ("_running", "loads", "number", "worker")

    def __init__(self, running: Running, number: int, worker: WorkerId) -> None:
        self._running = running
        self.number = number
        self.worker = worker
        self.loads = True

    def started(self, cached_tokens: int) -> None:
        self._running.feed(Started(self.number, cached_tokens))

    def token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self._running.feed(Tokens(self.number, (token_id,), None if logprob is None else (logprob,)))

    def prefilled(self, kv_session: bytes, token_id: int, logprob: TokenLogprob | None) -> None:
        self._running.unload(self)
        self._running.feed(Prefilled(self.number, kv_session, token_id, logprob))

    def kv_arrived(self) -> None:
        self._running.feed(KvArrived(self.number))

    def finished(self, reason: FinishReason) -> None:
        self._running.forget(self)
        self._running.feed(LegFinished(self.number, reason))

    def failed(self, error: EdgeError, *, retryable: bool) -> None:
        self._running.forget(self)
        self._running.feed(LegFailed(self.number, error, retryable))
