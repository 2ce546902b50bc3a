"""Envelopes from edges: who opened a link, and whose child a request is. Checked once, on rank 0."""

from __future__ import annotations

import base64
import binascii
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from configuration.reading import SettingsError
from enginelink.envelope import (
    PURPOSE_LINK,
    PURPOSE_RETURN,
    PURPOSE_SUBMIT,
    Claims,
    EnvelopeError,
    Key,
    ReplayGuard,
    Verifier,
)
from worker.core.types import Phase
from worker.refusal import invalid

REREAD_S = 1.0
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


NO_LINEAGE = Lineage()


class _EnvelopeKey(msgspec.Struct, frozen=True):
    id: str
    secret: str
    sign_from: float = 0.0
    retire_at: float | None = None


class _KeysFile(msgspec.Struct, frozen=True):
    envelope_keys: tuple[_EnvelopeKey, ...] = ()


def read_keys(file: Path) -> list[Key]:
    """The envelope keys in `file`. Raises SettingsError, naming it."""
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_KeysFile)
        return [
            Key(key.id, base64.b64decode(key.secret, validate=True), key.sign_from, key.retire_at)
            for key in content.envelope_keys
        ]
    except OSError as error:
        raise SettingsError(f"keys_file is {str(file)!r}, which cannot be read: {error.strerror}.") from error
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise SettingsError(f"keys_file is {str(file)!r}, which holds no envelope keys: {error}.") from error


class Envelopes:
    """Believes what an edge signed for this very start of this worker, once.

    `file` is read again when an envelope does not verify, at most every `reread_s`, so that new keys need no restart.
    `required`: a link needs an envelope, because others than this machine's users reach the listener.
    """

    def __init__(self, file: Path | None, instance_id: str, *, required: bool, reread_s: float = REREAD_S) -> None:
        self._file = file
        self._instance_id = instance_id
        self._required = required
        self._reread_s = reread_s
        self._guard = ReplayGuard()
        self._verifier = Verifier(read_keys(file) if file is not None else (), instance_id, self._guard)
        self._read_s = time.monotonic()

    def require_link(self, envelope: str) -> None:
        """Raises Refused where a link may not be opened with `envelope`."""
        if envelope or self._required:
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
        return Lineage(claims.parent or None, claims.family, claims.turn)

    def returned_turn(self, envelope: str, conversation: str) -> str:
        """The turn of `conversation` that another worker serves, as `envelope` states it. Raises Refused."""
        return self._verify(envelope, purpose=PURPOSE_RETURN, conversation=conversation).turn

    def _verify(self, envelope: str, **expected: object) -> Claims:
        now_s = time.time()
        try:
            try:
                return self._verifier.verify(envelope, now_s, **expected)
            except EnvelopeError:
                if not self._reread():
                    raise
                return self._verifier.verify(envelope, now_s, **expected)
        except EnvelopeError as error:
            log.warning("an envelope is refused", why=str(error), purpose=expected["purpose"])
            raise invalid("lineage: the envelope is not valid for this request") from error

    def _reread(self) -> bool:
        now_s = time.monotonic()
        if self._file is None or now_s - self._read_s < self._reread_s:
            return False
        self._read_s = now_s
        try:
            self._verifier = Verifier(read_keys(self._file), self._instance_id, self._guard)
        except SettingsError as error:
            log.warning("the keys stay as they were", why=str(error))
            return False
        return True
