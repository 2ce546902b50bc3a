"""What of a leg's lineage goes to a worker, by what the worker says that it takes. What does not go is counted."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import structlog
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.core.life_events import Phase
from edge.core.types import Lineage, TurnId, WorkerId
from edge.legs import LegOrder
from edge.signing import EnvelopeSigner
from enginelink import envelope, trtllm_affinity
from enginelink.trtllm_affinity import AffinityError, GrpcHint
from openengine.v1 import server_pb2

LINEAGE = "kinroute-lineage"
WARN_EVERY_S = 10.0

Metadata = tuple[tuple[str, str], ...]
log = structlog.get_logger()


class Takes(enum.Enum):
    """How a worker wants to be told of lineage."""

    ENVELOPE = enum.auto()
    TRTLLM_HINT = enum.auto()
    NOTHING = enum.auto()


class Unsent(enum.StrEnum):
    NOT_TAKEN = "the worker takes none"
    NO_KEY = "no key"
    NOT_CONTEXT = "not a context-only request"
    NOT_SENDABLE = "ids that cannot be sent"
    REFUSED = "refused by the worker"


def taken_by(info: server_pb2.ServerInfo) -> Takes:
    """Ours before the other dialect, where a worker says that it takes both."""
    said = info.extra.fields
    for name, takes in ((envelope.CAPABILITY, Takes.ENVELOPE), (trtllm_affinity.CAPABILITY, Takes.TRTLLM_HINT)):
        if name in said and said[name].bool_value:
            return takes
    return Takes.NOTHING


async def _nothing() -> None:
    return


class Hints(Collector):
    """`affinity_key`: of TensorRT-LLM's dialect; empty where there is none. `reread`: look for new keys now."""

    def __init__(
        self,
        signer: EnvelopeSigner,
        affinity_key: bytes = b"",
        reread: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self.reread = reread
        self._signer = signer
        self._affinity_key = affinity_key
        self._unsent: Counter[Unsent] = Counter(dict.fromkeys(Unsent, 0))
        self._warned_s: dict[WorkerId, float] = {}

    def use_affinity_key(self, key: bytes) -> None:
        self._affinity_key = key

    def link(self, instance_id: str) -> str:
        """For a link or an abort; empty where nothing can be signed."""
        return self._signer.link(instance_id)

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str, instance_id: str, takes: Takes) -> str:
        return self._signer.returned(lineage, turn_id, tenant, instance_id) if takes is Takes.ENVELOPE else ""

    def envelope(self, order: LegOrder, instance_id: str, takes: Takes) -> str:
        """New at every call; empty where none goes."""
        if order.phase is Phase.GENERATION:
            return ""
        signed = self._signer.leg(order, instance_id) if takes is Takes.ENVELOPE else ""
        if not signed:
            self._count(order, Unsent.NO_KEY if takes is Takes.ENVELOPE else Unsent.NOT_TAKEN)
        return signed

    def metadata(self, order: LegOrder, instance_id: str, takes: Takes) -> Metadata:
        """The same for OpenEngine, in the dialect that the worker takes."""
        if takes is not Takes.TRTLLM_HINT:
            signed = self.envelope(order, instance_id, takes)
            return ((LINEAGE, signed),) if signed else ()
        lineage = order.lineage
        if lineage.parent is None or order.phase is Phase.GENERATION:
            return ()
        if order.phase is not Phase.CONTEXT:
            self._count(order, Unsent.NOT_CONTEXT)
            return ()
        if not self._affinity_key:
            self._count(order, Unsent.NO_KEY)
            return ()
        hint = GrpcHint(order.model, lineage.conversation, lineage.parent, order.request_id)
        try:
            return hint.metadata(self._affinity_key)
        except AffinityError:
            self._count(order, Unsent.NOT_SENDABLE)
            return ()

    def given_up(self, worker_id: WorkerId) -> None:
        """The worker refused twice what this edge signed: a request goes there without lineage."""
        self._unsent[Unsent.REFUSED] += 1
        now_s = time.monotonic()
        if now_s - self._warned_s.get(worker_id, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[worker_id] = now_s
            log.warning("a worker refuses this edge's lineage, it is served without", worker=worker_id)

    def _count(self, order: LegOrder, why: Unsent) -> None:
        """Only a parent is missed: without one there was nothing to believe."""
        if order.lineage.parent is not None:
            self._unsent[why] += 1

    def collect(self) -> Iterator[Metric]:
        unsent = CounterMetricFamily(
            "kinroute_edge_unsent_lineage", "Legs that went to a worker without their lineage.", labels=["reason"]
        )
        for why, count in self._unsent.items():
            unsent.add_metric([why.value], count)
        yield unsent
