"""OpenEngine's Inference service, for clients that talk to this worker directly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import grpc
import numpy as np

from enginelink import generate_rules as rules
from openengine.v1 import error_pb2, generation_pb2, kv_pb2, service_pb2_grpc
from worker.answers import REASONS, Spell, error_of, stop_match_of, token_info, usage_of
from worker.commands import PinEnded, Rejected, Told
from worker.core.outputs import Failed, Finished, HandoffReady, KvArrived, Output, TokenOut
from worker.core.types import Logprobs, Request, TokenIds
from worker.intake import Intake
from worker.metadata import Metadata
from worker.refusal import Refused, invalid, overloaded, refusing, unsupported
from worker.requests import Active, Requests
from worker.text import AnswerText, TextModel

MAX_UNREAD = 4096
UNREAD_DEADLINE_S = 30.0
FAREWELL_DEADLINE_S = 1.0
TERMINAL = frozenset({"prefill_ready", "finished", "error"})

Stream = grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class Serving(Protocol):
    """What the service needs of the worker."""

    requests: Requests
    intake: Intake
    text: TextModel | None

    def session_of(self, active: Active, output: HandoffReady) -> bytes: ...


class InferenceService(service_pb2_grpc.InferenceServicer):  # type: ignore[misc]  # generated code is untyped
    def __init__(self, worker: Serving) -> None:
        self._worker = worker

    async def Generate(self, message: generation_pb2.GenerateRequest, context: Stream) -> None:
        """A refusal is a status; after acceptance a failure is one terminal event, then OK, but for a client that reads
        nothing: it finds a status."""
        answer = None
        try:
            answer = self._accept(message, Metadata.read(context.invocation_metadata() or ()))
            await answer.write_to(context)
        except Refused as refused:
            await context.abort(refused.status, refused.message, refused.trailing_metadata)
        finally:
            if answer is not None:
                answer.close()

    def _accept(self, message: generation_pb2.GenerateRequest, metadata: Metadata) -> Answer:
        worker = self._worker
        worker.requests.require_open(message.request_id)
        if metadata.target_dp_rank not in {None, message.kv.session.dp_rank, 0}:
            raise invalid(
                f"openengine-target-dp-rank is {metadata.target_dp_rank}: this worker is data-parallel rank 0 alone"
            )
        with refusing():
            rules.require_stopping(message.stopping)
        stop_texts = rules.stop_texts(message.stopping)
        if stop_texts and worker.text is None:
            raise unsupported("stopping.conditions has a stop_text: this model folder has no tokenizer.json")
        request = worker.intake.from_generate(worker.requests.next_key(), message, self._prompt(message), metadata)
        answer = Answer(worker, request, worker.text.answer(stop_texts) if worker.text else None)
        answer.active = worker.requests.accept(request, message.request_id, answer)
        return answer

    def _prompt(self, message: generation_pb2.GenerateRequest) -> TokenIds:
        match message.WhichOneof("input"):
            case "token_ids":
                if message.token_ids.ids and max(message.token_ids.ids) > np.iinfo(np.int32).max:
                    raise invalid("token_ids has an id outside of the vocabulary")
                return np.array(message.token_ids.ids, dtype=np.int32)
            case "prompt":
                if self._worker.text is None:
                    raise unsupported("prompt: this model folder has no tokenizer.json, send token_ids")
                return np.array(self._worker.text.encode(message.prompt), dtype=np.int32)
        raise invalid("input is missing: prompt or token_ids")


class Answer:
    """One stream. What happens waits here until the client has read what came before."""

    active: Active

    def __init__(
        self,
        worker: Serving,
        request: Request,
        text: AnswerText | None,
        unread_deadline_s: float = UNREAD_DEADLINE_S,
    ) -> None:
        self._worker = worker
        self._unread_deadline_s = unread_deadline_s
        self._first_token = request.first_token
        self._text = text
        self._spell: Spell | None = worker.text.token if worker.text else None
        self._happened: deque[Output | Rejected] = deque()
        self._wake = asyncio.Event()

    def take(self, active: Active, output: Told) -> None:
        if not isinstance(output, PinEnded):
            self._happened.append(output)

    def flush(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """The stream is over. A context leg's pages stay for whoever got its session."""
        if not self.active.pinned:
            self._worker.requests.cancel(self.active)

    async def write_to(self, stream: Stream) -> None:
        """Until the terminal event. Raises Refused where the engine turned the request away, or the client reads
        nothing."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._happened:
                for response in self._responses(self._happened.popleft()):
                    if not await self._written(stream, response):
                        return
                    if response.WhichOneof("event") in TERMINAL:
                        return

    async def _written(self, stream: Stream, response: generation_pb2.GenerateResponse) -> bool:
        """False where the client is too far behind: then it is told that, and nothing else. Raises Refused where it
        reads nothing: a write that was given up leaves room for a status alone."""
        unread = overloaded("the answer was left unread")
        behind = len(self._happened) > MAX_UNREAD
        if behind:
            response = self._last(error=unread.event())
        response.request_id = self.active.request_id
        try:
            async with asyncio.timeout(FAREWELL_DEADLINE_S if behind else self._unread_deadline_s):
                await stream.write(response)
        except TimeoutError:
            self._worker.requests.count_slow_consumer()
            raise unread from None
        if behind:
            self._worker.requests.count_slow_consumer()
        return not behind

    def _responses(self, output: Output | Rejected) -> Iterator[generation_pb2.GenerateResponse]:
        match output:
            case TokenOut() | KvArrived() if self._stopped():
                # The token that stops an answer is no part of it.
                return
            case TokenOut():
                yield from self._token(output.token_id, output.logprobs)
            case KvArrived() if self._first_token is not None:
                # The context leg sampled it; here its stream begins.
                yield from self._token(self._first_token, None)
            case HandoffReady():
                session = kv_pb2.KvSessionRef.FromString(self._worker.session_of(self.active, output))
                yield self._last(prefill_ready=generation_pb2.PrefillReady(kv_session=session))
            case Finished():
                held = self._text.finish() if self._text else ""
                if held:
                    yield generation_pb2.GenerateResponse(token=generation_pb2.TokenOutput(output_index=0, text=held))
                match = stop_match_of(output, self._worker.intake.eos_token_ids)
                yield self._finished(REASONS[output.reason], match)
            case Failed():
                yield self._last(error=error_of(output))
            case Rejected():
                raise output.refused

    def _stopped(self) -> bool:
        """Whether the next thing that happened is the end, by a token that came just before."""
        following = self._happened[0] if self._happened else None
        return isinstance(following, Finished) and following.stop_token_id is not None

    def _token(self, token_id: int, logprobs: Logprobs | None) -> Iterator[generation_pb2.GenerateResponse]:
        text, stop_text = self._text.push(token_id) if self._text else ("", None)
        token = generation_pb2.TokenOutput(
            output_index=0, tokens=[token_info(token_id, logprobs, self._spell)], text=text
        )
        yield generation_pb2.GenerateResponse(token=token)
        if stop_text is not None:
            yield self._finished(generation_pb2.FINISH_REASON_STOP, generation_pb2.StopMatch(stop_text=stop_text))

    def _finished(
        self, reason: generation_pb2.FinishReason, match: generation_pb2.StopMatch | None
    ) -> generation_pb2.GenerateResponse:
        finished = generation_pb2.GenerationFinished(output_index=0, reason=reason, stop_match=match)
        return self._last(finished=finished)

    def _last(
        self,
        *,
        prefill_ready: generation_pb2.PrefillReady | None = None,
        finished: generation_pb2.GenerationFinished | None = None,
        error: error_pb2.EngineError | None = None,
    ) -> generation_pb2.GenerateResponse:
        """The one response that carries `usage`."""
        return generation_pb2.GenerateResponse(
            prefill_ready=prefill_ready, finished=finished, error=error, usage=usage_of(self.active)
        )
