"""One request's answers while they are made: starts the turns, sends what comes, ends what nobody reads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

import orjson

from edge.core.types import Receipt, Turn
from edge.driver import Driver
from edge.http.asgi import Headers, Receive, Scope, Send, abort
from edge.http.asked import Asked
from edge.http.choice import Choice
from edge.http.delivery import Caller, Delivery, Heartbeat
from edge.http.recent import RequestRecord
from edge.settings import Limits
from edge.telemetry import Metrics


class Answering:
    """Holds the choices of one request. However it ends, no turn is left running.

    `spend` hears of generated tokens as they come. `lineage`: headers of its own that a 200 has.
    """

    def __init__(
        self,
        driver: Driver,
        limits: Limits,
        metrics: Metrics,
        record: RequestRecord,
        spend: Callable[[int], None],
        lineage: Headers,
    ) -> None:
        self._driver = driver
        self._limits = limits
        self._metrics = metrics
        self._record = record
        self._spend = spend
        self._spent = 0
        self._lineage = lineage
        self._wake = asyncio.Event()
        self._choices: list[Choice] = []

    async def deliver(
        self, asked: Asked, turns: Sequence[Turn], prefix: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Raises EdgeError as long as nothing was sent, and ClientGone."""
        per_prompt = asked.options.choices
        prompt_tokens = [turn.prompt_tokens for turn in turns[::per_prompt]]
        self._record.prompt_tokens = sum(prompt_tokens)
        form = asked.make_format(prefix + os.urandom(12).hex(), int(time.time()), len(turns), prompt_tokens)
        woken = self._wake.set
        limit = self._limits.client_buffer_chars if asked.options.stream else None

        def overfull() -> None:
            self._metrics.slow_clients += 1
            self._record.error = "the caller did not read its answer fast enough"
            self._cancel()
            abort(scope)

        self._choices = [
            Choice(index, index // per_prompt, asked.answer_text(), woken, overfull=overfull, max_pending=limit)
            for index in range(len(turns))
        ]
        delivery = Delivery(self._choices, form, self._wake, send, headers=self._headers, went_on=self._note_progress)
        try:
            with Caller(receive, woken) as caller:
                for turn, choice in zip(turns, self._choices, strict=True):
                    choice.running = self._driver.start(turn, choice)
                if not asked.options.stream:
                    await delivery.whole(caller)
                    return
                heartbeat = Heartbeat(self._limits.stream_comment_s, woken)
                try:
                    error = await delivery.stream(caller, heartbeat)
                finally:
                    heartbeat.close()
                if error is not None:
                    self._record.failed(error)
        finally:
            self._cancel()
            self._note_end()

    def _cancel(self) -> None:
        for choice in self._choices:
            choice.cancel()

    def _headers(self) -> Headers:
        """Those of a 200, as far as they are known when its status line goes out."""
        self._record.status = 200
        receipt = self._choices[0].receipt
        return [
            (b"x-request-id", self._record.request_id.encode()),
            (b"x-kinroute-receipt", _receipt_json(receipt, self._record.ignored_lineage)),
            *self._lineage,
        ]

    def _note_progress(self) -> None:
        record = self._record
        if record.first_token_s is None and any(choice.has_begun for choice in self._choices):
            record.first_token_s = record.age_s
            self._metrics.first_token.observe(record.first_token_s)
        record.completion_tokens = sum(choice.completion_tokens for choice in self._choices)
        if record.completion_tokens > self._spent:
            self._spend(record.completion_tokens - self._spent)
            self._spent = record.completion_tokens

    def _note_end(self) -> None:
        self._note_progress()
        record, choices = self._record, self._choices
        record.receipts = [choice.receipt for choice in choices]
        record.finish_reasons = [choice.finish_reason or "" for choice in choices]
        record.cached_tokens = choices[0].cached_tokens
        self._metrics.prompt_tokens += record.prompt_tokens
        self._metrics.cached_tokens += record.cached_tokens
        self._metrics.completion_tokens += record.completion_tokens


def _receipt_json(receipt: Receipt, ignored_lineage: str) -> bytes:
    told = {
        "context_worker": receipt.context_worker,
        "generation_worker": receipt.generation_worker,
        "attempts": receipt.attempts,
        "conversation": receipt.conversation,
    }
    if ignored_lineage:
        told["ignored_lineage"] = ignored_lineage
    return orjson.dumps(told)
