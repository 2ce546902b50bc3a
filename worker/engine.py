"""What every rank does with a step: serve and fetch pages, run the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from torch import Tensor

from worker.control import Pulled
from worker.core.handoff import HandoffError, SessionRef
from worker.core.replica import Replica
from worker.core.step_work import PullWork, StepWork
from worker.core.types import RequestKey
from worker.memory.mover import Mover
from worker.memory.transfer.client import PullResult, TransferClient
from worker.memory.transfer.server import TransferServer
from worker.model.runner import ModelRunner
from worker.session_keys import SessionKeys

log = structlog.get_logger()


@dataclass(slots=True)
class Engine:
    """One rank's parts. Used on the engine thread alone, but for `on_pulled`, which a transfer thread calls.

    `mover`: where there are colder tiers.
    """

    replica: Replica
    runner: ModelRunner
    server: TransferServer
    client: TransferClient
    sessions: SessionKeys
    on_pulled: Callable[[Pulled], None]
    mover: Mover | None = None
    pinned: set[RequestKey] = field(default_factory=set)

    def begin(self, work: StepWork) -> list[RequestKey]:
        """Pins stand and pulls have begun when this returns; the requests whose pins ended.

        A pin is open before its forward has run: nobody knows its secret until rank 0 has sampled, which is after every
        rank's forward.
        """
        if self.mover is not None:
            self.mover.submit(work.copies)
            if self.mover.num_running:
                self.mover.wait_for(work.written_pages(self.replica.config.tokens_per_block))
        ended = [key for key in work.unpins if key in self.pinned]
        for key in ended:
            self.pinned.discard(key)
            self.server.unpin(self.sessions.session_id(key))
        for pin in work.pins:
            self.pinned.add(pin.request)
            self.server.pin(
                self.sessions.session_id(pin.request), self.sessions.secret(pin.request), pin.pages, pin.num_tokens
            )
        for pull in work.pulls:
            self._pull(pull)
        return ended

    def forward(self, work: StepWork) -> Tensor | None:
        """Logits [R, V] on rank 0."""
        return None if work.batch is None else self.runner.run(work.batch)

    def release(self, source: bytes) -> None:
        """Tell the context worker that every rank here has its pages. Does not wait."""
        self.client.release(SessionRef.parse(source))

    def held(self) -> dict[str, Any]:
        """What this rank holds now; raises AssertionError where its state contradicts itself."""
        self.replica.check()
        return {
            "pages": self.replica.cache.num_in_use,
            "requests": len(self.replica.sequences),
            "pins": len(self.pinned),
            "sessions": self.server.num_sessions,
            "pulls": self.client.num_pulls,
            "copies": self.mover.num_running if self.mover is not None else 0,
        }

    def decisions(self) -> list[tuple[object, ...]]:
        """The last ones, plan number first. From any thread: the copy is made in one piece."""
        return [decision.portable() for decision in list(self.replica.decisions)]

    def _pull(self, pull: PullWork) -> None:
        try:
            session = SessionRef.parse(pull.source)
        except HandoffError as error:
            self.on_pulled(Pulled(pull.request, str(error)))
            return
        self.client.pull(session, pull.first_block, pull.pages, functools.partial(self._pulled, pull.request))

    def _pulled(self, key: RequestKey, result: PullResult) -> None:
        self.on_pulled(Pulled(key, result.why))
