"""The requests that this worker has accepted and not ended, on the event loop."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from openengine.v1 import error_pb2
from worker.commands import Cancel, Command, Heard, PinEnded, Rejected, Returned, Submit, Told
from worker.core.outputs import Failed, Finished, HandoffReady, Started, TokenOut
from worker.core.types import Phase, Request, RequestKey
from worker.refusal import Refused, unavailable
from worker.telemetry import Metrics

MAX_ENDED = 4096


class Owner(Protocol):
    """Who asked for a request and hears of it: an edge's link, or one OpenEngine stream."""

    def take(self, active: Active, output: Told) -> None:
        """One thing that happened to `active`; terminal outputs come last and once."""

    def flush(self) -> None:
        """The step's outputs are complete."""


@dataclass(slots=True)
class Active:
    """One accepted request. `handle` is its owner's own name for it; the counts become its `usage`.

    `pinned`: its context leg has answered, and its pages wait for a generation worker.
    """

    key: RequestKey
    request_id: str
    phase: Phase
    owner: Owner
    handle: int
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    pinned: bool = False


class Requests:
    """Accepts, finds and ends requests; hands each step's outputs to their owners."""

    def __init__(self, post: Callable[[Command], None], metrics: Metrics) -> None:
        self._post = post
        self._metrics = metrics
        self._keys = itertools.count(1)
        self._by_key: dict[RequestKey, Active] = {}
        self._by_id: dict[str, Active] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.refusing = ""
        """Why no request is accepted now; empty while they are."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def pinned(self) -> int:
        return len(self._by_key) - len(self._by_id)

    @property
    def running(self) -> int:
        """Requests that have not answered yet."""
        return len(self._by_id)

    def next_key(self) -> RequestKey:
        return RequestKey(next(self._keys))

    def require_open(self, request_id: str) -> None:
        """Raises Refused: this worker accepts nothing now, or `request_id` is in use."""
        if self.refusing:
            raise unavailable(self.refusing)
        if request_id in self._by_id:
            raise Refused(error_pb2.ERROR_CODE_DUPLICATE_REQUEST, f"request_id {request_id!r} is active")

    def accept(self, request: Request, request_id: str, owner: Owner, handle: int = 0) -> Active:
        """From here on `owner` hears of it until a terminal output. The engine may still turn it away (`Failed`)."""
        active = Active(request.key, request_id, request.phase, owner, handle, len(request.token_ids))
        active.prompt_tokens -= request.resumed_tokens
        active.completion_tokens = request.resumed_tokens + (request.first_token is not None)
        self._by_key[request.key] = self._by_id[request_id] = active
        self._metrics.requests.labels(request.phase.name.lower()).inc()
        self._post(Submit(request))
        return active

    def cancel(self, active: Active) -> None:
        """Ends it, or the pin that it left. Nothing more is heard of it."""
        if self._by_key.pop(active.key, None) is not None:
            self._forget_id(active)
            self._post(Cancel(active.key))
            if not active.pinned:
                self._metrics.endings.labels("cancelled").inc()

    def abort(self, active: Active) -> None:
        """Ends it on somebody else's word: its owner hears that it was cancelled."""
        if active.pinned:
            self.cancel(active)
            return
        self._post(Cancel(active.key))
        self.deliver([Failed(active.key, "CANCELLED", "aborted", retryable=False)])

    def ended_lately(self, request_id: str) -> bool:
        return request_id in self._ended

    def count_slow_consumer(self) -> None:
        self._metrics.overloads.inc()

    def hear(self, heard: Heard | Returned) -> None:
        """Pass on what an edge told of a conversation."""
        self._post(heard)

    def find(self, request_id: str) -> Active | None:
        return self._by_id.get(request_id)

    def find_pinned(self, key: RequestKey) -> Active | None:
        active = self._by_key.get(key)
        return active if active is not None and active.pinned else None

    def all(self) -> list[Active]:
        return list(self._by_key.values())

    def deliver(self, outputs: Sequence[Told]) -> None:
        """One step's outputs, to their owners. Those of requests that were cancelled meanwhile are dropped."""
        owners: dict[int, Owner] = {}
        for output in outputs:
            active = self._by_key.get(output.key)
            if active is None:
                continue
            self._account(active, output)
            active.owner.take(active, output)
            owners[id(active.owner)] = active.owner
        for owner in owners.values():
            owner.flush()

    def fail_all(self, why: str) -> None:
        """Every request ends now: the group is lost, but the same request may succeed elsewhere."""
        self.refusing = why
        self.deliver([Failed(active.key, "INTERNAL", why, retryable=True) for active in self.all()])

    def _forget_id(self, active: Active) -> None:
        """Its id may be used again; that it was here is remembered for a while, for those who abort late."""
        if self._by_id.pop(active.request_id, None) is not None:
            self._ended[active.request_id] = None
            self._ended.move_to_end(active.request_id)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _account(self, active: Active, output: Told) -> None:
        match output:
            case TokenOut():
                active.completion_tokens += 1
            case Started():
                active.cached_tokens = output.cached_tokens
                self._metrics.prompt_tokens.labels("cache").inc(output.cached_tokens)
                self._metrics.prompt_tokens.labels("computed").inc(active.prompt_tokens - output.cached_tokens)
            case HandoffReady():
                active.completion_tokens += 1
                active.pinned = True
                self._forget_id(active)
                self._metrics.endings.labels("handed over").inc()
            case PinEnded():
                self._by_key.pop(active.key, None)
            case Finished() | Failed() | Rejected():
                self._by_key.pop(active.key, None)
                self._forget_id(active)
                self._metrics.endings.labels("finished" if isinstance(output, Finished) else "failed").inc()
