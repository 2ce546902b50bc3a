"""What the edge knows of its workers."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from edge.core.capabilities import OURS, Capabilities, Unusable
from edge.core.kv_index import MAX_BYTES, KvBatch, KvIndex, Resume
from edge.core.life_events import Phase
from edge.core.types import WorkerId


class Role(enum.Flag):
    CONTEXT = enum.auto()
    GENERATION = enum.auto()
    BOTH = CONTEXT | GENERATION


@dataclass(slots=True)
class Worker:
    """`role`: what the configuration uses it for. `in_flight`: this edge's own legs there.

    `others`: requests that it runs or queues for other edges, and `queued`: how many of all wait, as of its last
    report; `used_blocks` of `total_blocks` of its cache too, where it tells. `tokens_per_block`: of its cache;
    0 where that is not known. `cached_blocks`: how many of its blocks the index knows; None: it does not follow it.
    """

    worker_id: WorkerId
    role: Role
    ready: bool = False
    draining: bool = False
    instance_id: str = ""
    max_context_length: int = 0
    tokens_per_block: int = 0
    cached_blocks: int | None = None
    can: Capabilities = OURS
    in_flight: int = 0
    others: int = 0
    queued: int = 0
    used_blocks: int | None = None
    total_blocks: int | None = None

    @property
    def load(self) -> int:
        return self.in_flight + self.others


def _require_fit(role: Role, can: Capabilities) -> None:
    """Raises Unusable."""
    if Role.CONTEXT not in role:
        wanted, where = {Phase.GENERATION, Phase.AGGREGATED}, "generation_servers"
    elif Role.GENERATION not in role:
        wanted, where = {Phase.CONTEXT}, "context_servers"
    else:
        wanted, where = {Phase.AGGREGATED}, "both lists of servers, or in generation_servers alone"
    if not wanted & can.phases:
        raise Unusable(f"it stands in {where}, and serves {', '.join(sorted(can.phases))} alone")


class Fleet:
    """The workers of the configuration, by address. Fed by links; read by the router.

    `kv`: what their caches hold, within `kv_index_max_bytes`.
    """

    def __init__(
        self, context: Iterable[str], generation: Iterable[str], *, kv_index_max_bytes: int = MAX_BYTES
    ) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        for addresses, role in ((context, Role.CONTEXT), (generation, Role.GENERATION)):
            for address in addresses:
                worker_id = WorkerId(address)
                worker = self.workers.setdefault(worker_id, Worker(worker_id, role))
                worker.role |= role
        self.kv = KvIndex(len(self.workers), kv_index_max_bytes)
        # By address, so that every replica sees them in one order.
        ordered = sorted(self.workers.values(), key=lambda worker: worker.worker_id)
        self._serving = {
            role: [worker for worker in ordered if role in worker.role] for role in (Role.CONTEXT, Role.GENERATION)
        }

    def joined(
        self,
        worker_id: WorkerId,
        instance_id: str,
        max_context_length: int,
        tokens_per_block: int = 0,
        can: Capabilities = OURS,
    ) -> None:
        """The worker said welcome: it is ready for requests. Raises Unusable where it cannot do what the configuration
        uses it for."""
        worker = self.workers[worker_id]
        _require_fit(worker.role, can)
        worker.can = can
        worker.ready, worker.draining = True, False
        worker.instance_id, worker.max_context_length = instance_id, max_context_length
        worker.tokens_per_block = tokens_per_block
        worker.others = 0

    def lost(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        worker.ready, worker.others, worker.queued = False, 0, 0
        worker.used_blocks = worker.total_blocks = None
        self.unfollow(worker_id)

    def follow(self, worker_id: WorkerId, epoch: str) -> Resume:
        """The worker, which started as `epoch`, can tell its KV events: what to ask it for."""
        resume = self.kv.connected(worker_id, epoch)
        self._count_blocks(worker_id)
        return resume

    def fed(self, worker_id: WorkerId, batch: KvBatch) -> bool:
        """The worker told KV events. False: something is missing, ask for a snapshot."""
        is_whole = self.kv.feed(worker_id, batch)
        self._count_blocks(worker_id)
        return is_whole

    def unfollow(self, worker_id: WorkerId) -> None:
        """Nothing more is heard of its cache."""
        self.kv.lost(worker_id)
        self._count_blocks(worker_id)

    def _count_blocks(self, worker_id: WorkerId) -> None:
        known = self.kv.is_known(worker_id)
        self.workers[worker_id].cached_blocks = len(self.kv.workers[worker_id].blocks) if known else None

    def reported(
        self,
        worker_id: WorkerId,
        requests: int,
        *,
        draining: bool,
        queued: int = 0,
        blocks: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`requests`: all that the worker runs and queues, ours included; `blocks`: used, and in all."""
        worker = self.workers[worker_id]
        worker.queued = min(queued, max(requests, worker.in_flight))
        worker.used_blocks, worker.total_blocks = blocks
        worker.others = max(0, requests - worker.in_flight)
        worker.draining = draining

    def began(self, worker_id: WorkerId) -> None:
        self.workers[worker_id].in_flight += 1

    def ended(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        assert worker.in_flight > 0, f"{worker_id} ended a leg that never began"
        worker.in_flight -= 1

    def usable(self, role: Role) -> list[Worker]:
        """Ready workers for `role`, by address."""
        return [worker for worker in self._serving[role] if worker.ready and not worker.draining]

    @property
    def can_serve(self) -> bool:
        return bool(self.usable(Role.CONTEXT)) and bool(self.usable(Role.GENERATION))

    @property
    def max_context_length(self) -> int:
        """The longest prompt with its answer that every ready worker can hold; 0 while there is none."""
        lengths = [worker.max_context_length for worker in self.workers.values() if worker.ready]
        return min(lengths, default=0)
