"""One output of an answer, as it comes from the driver: a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edge.core.errors import Code, EdgeError
from edge.core.types import FinishReason, Receipt, TokenLogprob, Usage
from edge.grpc.asked import Asked
from edge.grpc.output_text import OutputText
from edge.single_leg import Prefill
from edge.tokenizing.vocabulary import Vocabulary
from openengine.v1 import generation_pb2 as wire

REASONS = {
    FinishReason.STOP: wire.FINISH_REASON_STOP,
    FinishReason.TOOL_CALLS: wire.FINISH_REASON_STOP,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
}


class Producing(Protocol):
    """What makes an output: a turn, or a leg."""

    receipt: Receipt

    def stop(self, reason: FinishReason) -> None: ...
    def cancel(self) -> None: ...


class Output:
    """Collects what is to be sent until somebody takes it. `woken` is called whenever there is more.

    It ends once: by the worker, by a stop text, by `prefill`, or with `error`; whatever comes later is ignored. A token
    that may be the one that stops it waits for what follows.
    """

    __slots__ = (
        "_asked",
        "_held",
        "_stopping_ids",
        "_text",
        "_tokens",
        "_vocabulary",
        "_woken",
        "cached_tokens",
        "completion_tokens",
        "error",
        "finished_by",
        "has_begun",
        "index",
        "prefill",
        "producing",
        "text",
    )

    def __init__(self, index: int, asked: Asked, woken: Callable[[], None]) -> None:
        self.index = index
        self.producing: Producing | None = None
        self.has_begun = False
        self.text = ""
        self.finished_by: wire.GenerationFinished | None = None
        self.prefill: Prefill | None = None
        self.error: EdgeError | None = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._asked = asked
        self._stopping_ids = asked.stopping_ids
        self._text = OutputText(asked.model.text.detokenizer(), asked.stop_texts)
        self._vocabulary = asked.model.text.vocabulary
        self._tokens: list[wire.TokenInfo] = []
        self._held: tuple[int, TokenLogprob | None] | None = None
        self._woken = woken

    @property
    def has_ended(self) -> bool:
        return self.finished_by is not None or self.prefill is not None or self.error is not None

    @property
    def unread(self) -> int:
        """Tokens that wait to be taken."""
        return len(self._tokens)

    # What the driver tells.

    def started(self, cached_tokens: int) -> None:
        self.has_begun = True
        self.cached_tokens = cached_tokens

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self.has_begun = True
        self.completion_tokens += len(ids)
        for at, token_id in enumerate(ids):
            if self.has_ended:
                break
            self._release()
            logprob = logprobs[at] if logprobs else None
            if token_id in self._stopping_ids:
                self._held = token_id, logprob
            elif not self.has_ended:
                self._add(token_id, logprob)
        self._woken()

    def judged(self, reason: FinishReason) -> FinishReason:
        """What its tokens say is their reader's affair."""
        return reason

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        self.cached_tokens = usage.cached_tokens
        self.completion_tokens = usage.completion_tokens
        if self.has_ended:
            return
        self.has_begun = True
        if reason is FinishReason.CANCELLED:
            self.failed(EdgeError(Code.CANCELLED, "aborted"))
            return
        match: wire.StopMatch | None = None
        if reason is FinishReason.STOP and self._held is not None:
            match = self._asked.stop_match(self._held[0])
            self._held = None
        self._release()
        if self.finished_by is None:
            rest, stop_text = self._text.finish()
            self.text += rest
            if stop_text is not None:
                reason, match = FinishReason.STOP, wire.StopMatch(stop_text=stop_text)
            self._finish(reason, match)
        self._woken()

    def prefilled(self, prefill: Prefill) -> None:
        self.prefill = prefill
        self.cached_tokens = prefill.usage.cached_tokens
        self.completion_tokens = prefill.usage.completion_tokens
        self._woken()

    def failed(self, error: EdgeError) -> None:
        if not self.has_ended:
            self.error = error
            self._woken()

    # What the answer asks.

    def take(self) -> wire.TokenOutput | None:
        """What came since the last call; None where that is nothing."""
        if not self._tokens and not self.text:
            return None
        taken = wire.TokenOutput(output_index=self.index, tokens=self._tokens, text=self.text)
        self._tokens, self.text = [], ""
        return taken

    def stop(self) -> None:
        """End it on somebody's word. It is told as any failure is."""
        if not self.has_ended and self.producing is not None:
            self.producing.stop(FinishReason.CANCELLED)

    def cancel(self) -> None:
        """Nobody reads it any more. Does nothing to one that ended."""
        if not self.has_ended and self.producing is not None:
            self.producing.cancel()

    def _release(self) -> None:
        """What waited was no stopping token after all."""
        if self._held is not None:
            (token_id, logprob), self._held = self._held, None
            self._add(token_id, logprob)

    def _add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self._tokens.append(_token_info(token_id, logprob, self._vocabulary))
        text, stop_text = self._text.push(token_id)
        self.text += text
        if stop_text is not None:
            self._finish(FinishReason.STOP, wire.StopMatch(stop_text=stop_text))
            if self.producing is not None:
                self.producing.stop(FinishReason.STOP)

    def _finish(self, reason: FinishReason, match: wire.StopMatch | None) -> None:
        self.finished_by = wire.GenerationFinished(output_index=self.index, reason=REASONS[reason], stop_match=match)


def _token_info(token_id: int, logprob: TokenLogprob | None, vocabulary: Vocabulary) -> wire.TokenInfo:
    """The rank of the token itself is known where it is among the best."""
    info = wire.TokenInfo(token_id=token_id, token=vocabulary.token_text(token_id))
    if logprob is None:
        return info
    info.logprob = logprob.logprob
    for rank, (other, value) in enumerate(logprob.top, start=1):
        info.candidates.add(token_id=other, logprob=value, token=vocabulary.token_text(other), rank=rank)
        if other == token_id:
            info.rank = rank
    return info
