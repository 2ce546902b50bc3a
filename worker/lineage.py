"""Envelopes from edges: who opened a link, and whose child a request is. Checked once, on rank 0."""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from enginelink.envelope import (
    PURPOSE_LINK,
    PURPOSE_RETURN,
    PURPOSE_SUBMIT,
    Claims,
    EnvelopeError,
    ReplayGuard,
    Verifier,
)
from worker.core.types import Phase
from worker.keys import WorkerKeys
from worker.refusal import unproven

REQUEST_TYPE = {
    Phase.CONTEXT: "context_only",
    Phase.GENERATION: "generation_only",
    Phase.AGGREGATED: "context_and_generation",
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a verified envelope says of a request; empty: nothing is known."""

    parent: str | None = None
    family: str = ""
    turn: str = ""
    tenant: str = ""


NO_LINEAGE = Lineage()


class Envelopes:
    """Believes what an edge signed for this very start of this worker, once.

    `required`: a link needs an envelope, because others than this machine's users reach the listener, and have shown no
    certificate. Where it does not, and there are no keys, whatever comes instead of one is not looked at.
    """

    def __init__(self, keys: WorkerKeys, instance_id: str, *, required: bool, guard: ReplayGuard | None = None) -> None:
        self._keys = keys
        self._instance_id = instance_id
        self._required = required
        self._guard = guard or ReplayGuard()
        self._used = keys.current()
        self._verifier = Verifier(self._used, instance_id, self._guard)

    def require_link(self, envelope: str) -> None:
        """Raises Refused where a link may not be opened, or a request aborted, with `envelope`."""
        if self._required or (envelope and self._keys.is_configured):
            self._verify(envelope, purpose=PURPOSE_LINK)

    def lineage_of(
        self, envelope: str, *, request_id: str, phase: Phase, model: str, conversation: str, prompt_hash: bytes
    ) -> Lineage:
        """What `envelope` says of the request that it came with. `prompt_hash`: SHA-256 of its token ids, little-endian
        uint32. Raises Refused."""
        claims = self._verify(
            envelope,
            purpose=PURPOSE_SUBMIT,
            request_id=request_id,
            request_type=REQUEST_TYPE[phase],
            model=model,
            conversation=conversation,
            prompt_sha256=prompt_hash.hex(),
        )
        return Lineage(claims.parent or None, claims.family, claims.turn, claims.tenant)

    def returned_turn(self, envelope: str, conversation: str) -> str:
        """The turn of `conversation` that another worker serves, as `envelope` states it. Raises Refused."""
        return self._verify(envelope, purpose=PURPOSE_RETURN, conversation=conversation).turn

    def _verify(self, envelope: str, **expected: object) -> Claims:
        keys = self._keys.current()
        if keys is not self._used:
            self._used = keys
            self._verifier = Verifier(keys, self._instance_id, self._guard)
        try:
            return self._verifier.verify(envelope, time.time(), **expected)
        except EnvelopeError as error:
            log.warning("an envelope is refused", why=str(error), purpose=expected["purpose"])
            raise unproven("lineage: the envelope is not valid for this request") from error
