"""One choice of an answer, as it comes from the driver: a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge.core.errors import Code, EdgeError
from edge.core.types import FinishReason, Receipt, TokenLogprob, Usage
from edge.driver import Running
from edge.http.answer import AnswerText

LOGPROB_CHARS = 200
"""What a token's log probabilities count for among the characters that wait."""


class Choice:
    """Collects one turn's answer. `woken` is called whenever there is more to take, or the choice ended.

    It ends once: by the worker, by a stop string, or with `error`; whatever comes later is ignored. `overfull` is
    called when more than `max_pending` characters wait to be taken.
    """

    __slots__ = (
        "_judged",
        "_max_pending",
        "_overfull",
        "_woken",
        "cached_tokens",
        "completion_tokens",
        "error",
        "finish_reason",
        "has_begun",
        "index",
        "logprobs",
        "prompt",
        "running",
        "text",
    )

    def __init__(
        self,
        index: int,
        prompt: int,
        text: AnswerText,
        woken: Callable[[], None],
        *,
        overfull: Callable[[], None],
        max_pending: int | None,
    ) -> None:
        self.index = index
        self.prompt = prompt  # which of the request's prompts it answers
        self.text = text
        self.running: Running | None = None
        self.has_begun = False
        self.finish_reason: FinishReason | None = None
        self._judged: FinishReason | None = None
        self.error: EdgeError | None = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self._woken = woken
        self._overfull = overfull
        self._max_pending = max_pending

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def receipt(self) -> Receipt:
        return Receipt() if self.running is None else self.running.receipt

    def started(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        if self.has_ended:
            return
        self.has_begun = True
        self.completion_tokens += len(ids)
        if logprobs:
            self.logprobs += logprobs
        if self.text.push(ids):
            self.finish_reason = self._named(FinishReason.STOP)
            if self.running is not None:
                self.running.stop(self.finish_reason)
        elif self._max_pending is not None and self._pending_chars > self._max_pending:
            self._overfull()
        self._woken()

    def judged(self, reason: FinishReason) -> FinishReason:
        """No token follows: what was held back comes out, and may be a stop string or the end of a call."""
        if self.has_ended or reason is FinishReason.CANCELLED:
            return self.finish_reason or reason
        if self._judged is None:
            self._judged = self._named(FinishReason.STOP if self.text.finish() else reason)
        return self._judged

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        if self.has_ended:
            return
        if reason is FinishReason.CANCELLED:
            self.failed(EdgeError(Code.CANCELLED, "The answer was cancelled.", retryable=True))
            return
        self.has_begun = True
        self.cached_tokens = usage.cached_tokens
        self.completion_tokens = usage.completion_tokens
        self.finish_reason = self.judged(reason)
        self._woken()

    def failed(self, error: EdgeError) -> None:
        if self.has_ended:
            return
        self.error = error
        self._woken()

    def cancel(self) -> None:
        """The caller is gone. Does nothing to a choice that ended."""
        if not self.has_ended and self.running is not None:
            self.running.cancel()

    def take_logprobs(self) -> list[TokenLogprob]:
        taken, self.logprobs = self.logprobs, []
        return taken

    @property
    def _pending_chars(self) -> int:
        return self.text.pending_chars + LOGPROB_CHARS * len(self.logprobs)

    def _named(self, reason: FinishReason) -> FinishReason:
        return FinishReason.TOOL_CALLS if self.text.calls_tools else reason
