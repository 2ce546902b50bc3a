"""Health's inference probe: a tiny turn, from its placement to its token."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from edge.core.errors import EdgeError
from edge.core.types import (
    ConversationKey,
    FamilyKey,
    FinishReason,
    Lineage,
    SamplingOptions,
    StopOptions,
    TokenLogprob,
    Turn,
    TurnId,
    Usage,
)
from edge.grpc.door import Caller
from edge.http.route import Parts
from edge.tokenizing.incremental import pack

PROBE_DEADLINE_S = 10.0


async def probe(parts: Parts, caller: Caller) -> str:
    """A request of its caller as any other; why it failed, or nothing. Raises EdgeError where a limit is reached."""
    principal = caller.principal
    parts.admission.begin(principal, time.monotonic())
    sink = _Probe()
    running = parts.driver.start(_probing_turn(parts.catalogue.names[0], caller), sink)
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S):
            return await sink.done
    except TimeoutError:
        return f"no token in {PROBE_DEADLINE_S:.0f} s"
    finally:
        running.cancel()
        parts.admission.end(principal)


class _Probe:
    """A sink; `done` says why it failed, or nothing."""

    def __init__(self) -> None:
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def started(self, cached_tokens: int) -> None:
        """Only its token counts."""

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self._settle("")

    def judged(self, reason: FinishReason) -> FinishReason:
        return reason

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        self._settle("" if usage.completion_tokens else "it ended without a token")

    def failed(self, error: EdgeError) -> None:
        self._settle(error.message)

    def _settle(self, why: str) -> None:
        if not self.done.done():
            self.done.set_result(why)


def _probing_turn(model: str, caller: Caller) -> Turn:
    """One token, of a conversation and a cache of its own."""
    own = secrets.token_hex(16)
    return Turn(
        turn_id=TurnId(own),
        model=model,
        token_ids=pack([0]),
        sampling=SamplingOptions(temperature=0.0),
        stops=StopOptions(1),
        principal=caller.principal,
        tenant_tag=caller.identified.tenant_tag,
        lineage=Lineage(ConversationKey(own), FamilyKey(own)),
        cache_salt=own.encode(),
        bypass_prefix_cache=True,
    )
