"""One answer on its way to its caller: deltas as they come, one terminal event an output, usage on the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from edge.core.errors import Code, EdgeError
from edge.grpc.asked import Asked
from edge.grpc.door import Call
from edge.grpc.errors import REFUSALS, event_of
from edge.grpc.output import Output, Producing
from edge.single_leg import Prefill
from openengine.v1 import error_pb2, kv_pb2
from openengine.v1 import generation_pb2 as wire

MAX_UNREAD = 4_096
"""Tokens that may wait for a caller who does not read."""
FAREWELL_DEADLINE_S = 1.0


class Answer:
    """Holds the outputs of one request. However it ends, `close` leaves nothing running.

    `metadata`: the initial metadata, sent with the first event. `seal`: makes of a prefill the reference that its
    caller may have. `went_on` is called when tokens were taken. `unread_deadline_s`: how long one event may wait to be
    read.
    """

    def __init__(
        self,
        asked: Asked,
        *,
        seal: Callable[[Prefill], kv_pb2.KvSessionRef],
        went_on: Callable[[], None],
        unread_deadline_s: float,
    ) -> None:
        self.metadata: Sequence[tuple[str, str]] = ()
        self.prompt_tokens = 0
        self.outputs = [Output(index, asked, self._woken) for index in range(asked.outputs)]
        self.is_aborted = False
        self._request_id = asked.request_id
        self._seal = seal
        self._went_on = went_on
        self._unread_deadline_s = unread_deadline_s
        self._wake = asyncio.Event()
        self._open = list(self.outputs)
        self._is_overfull = False
        self._has_sent = False

    @property
    def completion_tokens(self) -> int:
        return sum(output.completion_tokens for output in self.outputs)

    @property
    def usage(self) -> wire.Usage:
        completion = self.completion_tokens
        return wire.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.prompt_tokens + completion,
            cached_prompt_tokens=min(self.prompt_tokens, self.outputs[0].cached_tokens),
        )

    def start(self, produce: Callable[[Output], Producing]) -> None:
        """Raises EdgeError where it was aborted before anything ran."""
        if self.is_aborted:
            raise EdgeError(Code.CANCELLED, "aborted")
        for output in self.outputs:
            output.producing = produce(output)

    def abort(self) -> None:
        """End it on somebody else's word."""
        self.is_aborted = True
        for output in self.outputs:
            output.stop()

    def close(self) -> None:
        for output in self.outputs:
            output.cancel()

    async def deliver(self, call: Call) -> EdgeError | None:
        """Until the terminal event; returns the failure that it told, if it did. Raises EdgeError where the request was
        turned away before anything of it began, or its caller reads nothing: a write that was given up leaves room for
        a status alone."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            error = self._failure()
            if error is not None and self._is_refusal(error):
                raise error
            for response in self._take():
                await self._write(call, response)
            if self._is_overfull:
                error = _unread()
            if error is not None:
                self.close()
                self._went_on()
                last = self._response(error=event_of(error), usage=self.usage)
                await self._write(call, last, FAREWELL_DEADLINE_S if self._is_overfull else None)
                return error
            if not self._open:
                return None

    def _woken(self) -> None:
        if not self._is_overfull and sum(output.unread for output in self._open) > MAX_UNREAD:
            self._is_overfull = True
            self.close()
        self._wake.set()

    def _failure(self) -> EdgeError | None:
        return next((output.error for output in self.outputs if output.error is not None), None)

    def _is_refusal(self, error: EdgeError) -> bool:
        begun = self._has_sent or any(output.has_begun for output in self.outputs)
        return not begun and error.code in REFUSALS

    def _take(self) -> list[wire.GenerateResponse]:
        """Whatever is new. The last one of all has `usage`."""
        responses = []
        for output in list(self._open):
            token = output.take()
            if token is not None:
                responses.append(self._response(token=token))
            if output.finished_by is not None:
                self._open.remove(output)
                responses.append(self._response(finished=output.finished_by))
            elif output.prefill is not None:
                self._open.remove(output)
                ready = wire.PrefillReady(kv_session=self._seal(output.prefill))
                responses.append(self._response(prefill_ready=ready))
        if responses:
            self._went_on()
        if not self._open:
            responses[-1].usage.CopyFrom(self.usage)
        return responses

    async def _write(self, call: Call, response: wire.GenerateResponse, deadline_s: float | None = None) -> None:
        try:
            async with asyncio.timeout(deadline_s or self._unread_deadline_s):
                if not self._has_sent:
                    self._has_sent = True
                    await call.begin(self.metadata)
                await call.write(response)
        except TimeoutError:
            self._is_overfull = True
            raise _unread() from None

    @property
    def was_unread(self) -> bool:
        return self._is_overfull

    def _response(
        self,
        *,
        token: wire.TokenOutput | None = None,
        finished: wire.GenerationFinished | None = None,
        prefill_ready: wire.PrefillReady | None = None,
        error: error_pb2.EngineError | None = None,
        usage: wire.Usage | None = None,
    ) -> wire.GenerateResponse:
        return wire.GenerateResponse(
            request_id=self._request_id,
            token=token,
            finished=finished,
            prefill_ready=prefill_ready,
            error=error,
            usage=usage,
        )


def _unread() -> EdgeError:
    return EdgeError(Code.RATE_LIMITED, "the answer was left unread", retryable=True)
