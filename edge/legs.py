"""A leg as both protocols see it: what is ordered of a worker, and how the edge hears of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge.core.errors import EdgeError
from edge.core.life_events import Phase
from edge.core.types import (
    ConversationKey,
    FinishReason,
    Lineage,
    SamplingOptions,
    StopOptions,
    TokenLogprob,
    Turn,
    TurnId,
    WorkerId,
)
from enginelink.retention import Retention

REQUEST_TYPES = {
    Phase.CONTEXT: "context_only",
    Phase.GENERATION: "generation_only",
    Phase.AGGREGATED: "context_and_generation",
}


@dataclass(frozen=True, slots=True)
class LegOrder:
    """One attempt. `token_ids`: packed little-endian uint32, the last `resumed_tokens` of them generated before.

    `kv_session`: a serialized KvSessionRef, exactly as the context leg's worker gave it.
    """

    request_id: str
    turn_id: TurnId
    phase: Phase
    model: str
    token_ids: bytes
    sampling: SamplingOptions
    stops: StopOptions
    lineage: Lineage
    tenant: str
    cache_salt: str
    tenant_tag: bytes = b""
    kv_session: bytes = b""
    resumed_tokens: int = 0
    traceparent: str = ""
    tracestate: str = ""
    retention: Retention | None = None
    bypass_prefix_cache: bool = False


def order_of(
    turn: Turn, number: int, phase: Phase, *, kv_session: bytes = b"", resumed: Sequence[int] = ()
) -> LegOrder:
    """Leg `number` of the turn. `resumed`: tokens already produced, to stand behind the prompt."""
    tail = array("I", resumed).tobytes()
    return LegOrder(
        request_id=f"{turn.turn_id}-{number}",
        turn_id=turn.turn_id,
        phase=phase,
        model=turn.model,
        token_ids=turn.token_ids + tail if tail else turn.token_ids,
        sampling=turn.sampling,
        stops=turn.stops,
        lineage=turn.lineage,
        tenant=turn.principal.tenant,
        cache_salt=turn.cache_salt.hex(),
        tenant_tag=turn.tenant_tag,
        kv_session=kv_session,
        resumed_tokens=len(resumed),
        traceparent=turn.traceparent,
        tracestate=turn.tracestate,
        retention=turn.retention,
        bypass_prefix_cache=turn.bypass_prefix_cache,
    )


class LegListener(Protocol):
    """Hears of one leg, on the event loop, until `finished` or `failed`, which come once."""

    def started(self, cached_tokens: int) -> None: ...
    def token(self, token_id: int, logprob: TokenLogprob | None) -> None: ...
    def prefilled(self, kv_session: bytes, token_id: int, logprob: TokenLogprob | None) -> None: ...
    def kv_arrived(self) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...
    def failed(self, error: EdgeError, *, retryable: bool) -> None: ...


class Connection(Protocol):
    """One worker, over one protocol."""

    worker_id: WorkerId

    async def run(self) -> None:
        """Stay connected, again and again, until cancelled."""

    def submit(self, order: LegOrder, listener: LegListener) -> int:
        """Send it; returns the handle to cancel it by. A worker that cannot be reached fails it soon after."""

    def cancel(self, handle: int) -> None:
        """End it, or the pin that it left; nothing more is heard of it. Unknown handles are ignored."""

    def generating(self, conversation: ConversationKey) -> None:
        """The answer of a conversation that was prefilled there is being made elsewhere."""

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        """That answer is over. `reason` None: it failed, or nobody waited for it."""

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None:
        """Another worker serves this turn of the conversation: its finished children there may be demoted."""
