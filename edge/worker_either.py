"""A worker over EngineLink, or over OpenEngine where it knows nothing else."""

from __future__ import annotations

import structlog

from edge.core.types import ConversationKey, FinishReason, Lineage, TurnId
from edge.legs import Connection, LegListener, LegOrder
from edge.worker_link import NotSpoken, WorkerLink
from edge.worker_openengine import OpenEngineWorker

log = structlog.get_logger()


class EitherWorker:
    """Tries `link` until the worker says that it does not know it, and is `openengine` from then on."""

    def __init__(self, link: WorkerLink, openengine: OpenEngineWorker) -> None:
        self.worker_id = link.worker_id
        self._link = link
        self._openengine = openengine
        self._spoken: Connection = link

    async def run(self) -> None:
        try:
            await self._link.run()
        except NotSpoken:
            log.info("a worker knows no EngineLink, OpenEngine is spoken", worker=self.worker_id)
        self._spoken = self._openengine
        await self._openengine.run()

    def submit(self, order: LegOrder, listener: LegListener) -> int:
        return self._spoken.submit(order, listener)

    def cancel(self, handle: int) -> None:
        self._spoken.cancel(handle)

    def generating(self, conversation: ConversationKey) -> None:
        self._spoken.generating(conversation)

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        self._spoken.ended(conversation, reason, final=final)

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None:
        self._spoken.returned(lineage, turn_id, tenant)
