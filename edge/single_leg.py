"""One leg alone, for a caller that drives both phases itself: no other worker is tried, that is the caller's affair."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from edge.core.capabilities import needs_of
from edge.core.errors import Code, EdgeError
from edge.core.life_events import Phase, State
from edge.core.prompt_keys import Prompt
from edge.core.types import FinishReason, Receipt, TokenLogprob, Turn, Usage, WorkerId
from edge.driver import Driver, Sink
from edge.ended import EndedTurn
from edge.legs import order_of
from edge.openengine_wire import first_token_of, read_session
from edge.pins import Pin

LEG = 1


@dataclass(frozen=True, slots=True)
class Prefill:
    """A context leg's end. `kv_session`: a serialized KvSessionRef, as its worker gave it. `pin`: the worker's instance
    id and the session id, by which the pages are known while they wait."""

    kv_session: bytes
    pin: tuple[str, str]
    usage: Usage


class LegSink(Sink, Protocol):
    def prefilled(self, prefill: Prefill) -> None:
        """The end of a context leg, in the place of `finished`."""


class SingleLeg:
    """A context leg, or the generation leg of a reference; hears of it as its worker's listener.

    `pin_life_s`: how long the pages of a context leg may wait. `kv_session` and `pulled_from`: of a generation leg, its
    reference and the instance that gave it.
    """

    def __init__(
        self,
        driver: Driver,
        turn: Turn,
        sink: LegSink,
        *,
        pin_life_s: float = 0.0,
        kv_session: bytes = b"",
        pulled_from: str = "",
    ) -> None:
        self.tenant = turn.principal.tenant
        self.receipt = Receipt(family=turn.lineage.family, conversation=turn.lineage.conversation)
        self._driver = driver
        self._turn = turn
        self._sink = sink
        self._phase = Phase.GENERATION if kv_session else Phase.CONTEXT
        self._pin_life_s = pin_life_s
        self._kv_session = kv_session
        self._pulled_from = pulled_from
        self._pin: Pin | None = None
        self._worker: WorkerId | None = None
        self._handle = 0
        self._loads = False
        self._has_arrived = False
        self._cached_tokens = 0
        self._sent = 0
        self._loop = asyncio.get_running_loop()
        self._began_s = self._since_s = self._loop.time()
        self._state = State.PLACING

    @classmethod
    def context(cls, driver: Driver, turn: Turn, sink: LegSink, *, pin_life_s: float) -> SingleLeg:
        return cls(driver, turn, sink, pin_life_s=pin_life_s).start()

    @classmethod
    def generation(cls, driver: Driver, turn: Turn, sink: LegSink, *, kv_session: bytes, pulled_from: str) -> SingleLeg:
        return cls(driver, turn, sink, kv_session=kv_session, pulled_from=pulled_from).start()

    def start(self) -> SingleLeg:
        """The first that the sink hears comes not before this returns."""
        self._driver.running.add(self)
        self._loop.call_soon(self._begin)
        return self

    def cancel(self) -> None:
        """Nobody listens any more: nothing is told from here on."""
        self._end(None)

    def stop(self, reason: FinishReason) -> None:
        if self._state is not State.DONE:
            self._end(reason)
            self._sink.finished(reason, self._usage)

    def watch(self, now_s: float) -> None:
        limit_s = self._driver.deadlines.of(self._state)
        if limit_s is not None and now_s - self._since_s > limit_s:
            message = f"The worker was silent for too long ({self._state})."
            self._fail(EdgeError(Code.TIMED_OUT, message, retryable=True))

    # What its worker tells.

    def started(self, cached_tokens: int) -> None:
        if self._state is State.CONTEXT:
            self._cached_tokens = cached_tokens
            assert self._worker is not None
            self._driver.tell_returned(self._turn, self._worker)
            self._sink.started(cached_tokens)

    def token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        if self._phase is Phase.CONTEXT:
            self._fail(_out_of_turn())
        elif self._state is not State.DONE:
            self.kv_arrived()
            if self._state is State.DECODING:
                self._tell(token_id, logprob)

    def prefilled(self, kv_session: bytes, token_id: int, logprob: TokenLogprob | None) -> None:
        if self._state is State.DONE:
            return
        session = read_session(kv_session)
        if self._phase is not Phase.CONTEXT or session is None:
            self._fail(_out_of_turn())
            return
        assert self._worker is not None
        instance_id = self._driver.fleet.workers[self._worker].instance_id
        lineage = self._turn.lineage
        connection = self._driver.connections[self._worker]
        until_s = self._loop.time() + self._pin_life_s
        key = (instance_id, session.session_id)
        pin = Pin(key, self.tenant, connection, self._handle, lineage.conversation, lineage.final, until_s)
        self._sent = 1
        self._over()
        connection.generating(lineage.conversation)
        self._driver.pins.add(pin)
        self._sink.prefilled(Prefill(kv_session, key, self._usage))

    def kv_arrived(self) -> None:
        if self._state is not State.MOVING:
            return
        self._has_arrived = True
        if self._pin is not None:
            self._pin.release()
        session = read_session(self._kv_session)
        first_token = None if session is None else first_token_of(session)
        self._sink.started(0)
        if first_token is not None:
            # The context leg sampled it; here its stream begins.
            self._tell(first_token, None)
        if self._state is State.MOVING:
            self._state = State.DECODING

    def finished(self, reason: FinishReason) -> None:
        if self._phase is Phase.CONTEXT:
            self._fail(_out_of_turn())
        elif self._state is not State.DONE:
            self.kv_arrived()
        if self._state is not State.DONE:
            self._over(reason)
            self._sink.finished(reason, self._usage)

    def failed(self, error: EdgeError, *, retryable: bool) -> None:
        if self._state is not State.DONE:
            self._over()
            self._sink.failed(error)

    def _begin(self) -> None:
        if self._state is State.DONE:
            return
        self.receipt.attempts = 1
        try:
            self._worker, why = self._place()
        except EdgeError as error:
            self._over()
            self._sink.failed(error)
            return
        self.receipt.reasons.append(why)
        self._state = State.CONTEXT if self._phase is Phase.CONTEXT else State.MOVING
        self._since_s = self._loop.time()
        self._driver.fleet.began(self._worker)
        self._loads = True
        order = order_of(self._turn, LEG, self._phase, kv_session=self._kv_session)
        self._handle = self._driver.connections[self._worker].submit(order, self)

    def _place(self) -> tuple[WorkerId, str]:
        driver, turn = self._driver, self._turn
        if self._phase is Phase.CONTEXT:
            prompt = Prompt(turn.token_ids, turn.cache_salt.hex().encode())
            worker, why = driver.router.context_for(
                turn.lineage, turn.prompt_tokens, prompt=prompt, needs=needs_of(turn)
            )
            self.receipt.context_worker = worker
            return worker, why
        source = [one.worker_id for one in driver.fleet.workers.values() if one.instance_id == self._pulled_from]
        session = read_session(self._kv_session)
        connector = "" if session is None else session.transfer_backend
        worker, why = driver.router.generation_for(
            turn.lineage, connector=connector, avoid=source, needs=needs_of(turn)
        )
        self.receipt.generation_worker = worker
        self._pin = None if session is None else driver.pins.take((self._pulled_from, session.session_id))
        return worker, why

    def _tell(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self._sent += 1
        self._since_s = self._loop.time()
        self._sink.tokens((token_id,), None if logprob is None else (logprob,))

    @property
    def _usage(self) -> Usage:
        return Usage(self._turn.prompt_tokens, self._cached_tokens, self._sent)

    def _fail(self, error: EdgeError) -> None:
        if self._state is not State.DONE:
            self._end(None)
            self._sink.failed(error)

    def _end(self, reason: FinishReason | None) -> None:
        """Before its worker did."""
        if self._state is not State.DONE and self._loads and self._worker is not None:
            self._driver.connections[self._worker].cancel(self._handle)
        self._over(reason)

    def _over(self, reason: FinishReason | None = None) -> None:
        if self._state is State.DONE:
            return
        self._state = State.DONE
        if self._loads and self._worker is not None:
            self._loads = False
            self._driver.fleet.ended(self._worker)
        if self._pin is not None and self._has_arrived:
            self._pin.ended(reason)
        elif self._pin is not None:
            # The pages still wait: the caller may send its reference again.
            self._driver.pins.add(self._pin)
        self._driver.running.discard(self)
        self._driver.receipts.append((self._turn.turn_id, self.receipt))
        for listener in self._driver.end_listeners:
            now_s = self._loop.time()
            listener.ended(EndedTurn(self._turn, self._phase, self._began_s, now_s, reason, self._sent))


def _out_of_turn() -> EdgeError:
    return EdgeError(Code.WORKER_FAILED, "A worker spoke out of turn.", retryable=True)
