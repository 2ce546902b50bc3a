"""TensorRT-LLM's signed hints, from orchestrators that speak its dialect to this worker's OpenEngine server.

Conversations that no envelope of an edge names keep a namespace of their own where this dialect is taken: what a peer
writes can then never be, or be the parent of, a conversation of an edge.
"""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from configuration.reading import SettingsError, read_secret
from enginelink.trtllm_affinity import ID_KEY, AffinityError, Presented
from worker.core.types import Phase
from worker.lineage import Lineage
from worker.refusal import unproven

SETTING = "internal_request_auth_key_file"
PEER = "peer:"
REREAD_S = 1.0

log = structlog.get_logger()


class AffinityHints:
    """Believes what is signed under the key in `file`, which is read again when something is not; without a file,
    nothing. Raises SettingsError where the file cannot be used."""

    def __init__(self, file: Path | None = None, reread_s: float = REREAD_S) -> None:
        self._file = file
        self._reread_s = reread_s
        self._keys = () if file is None else (read_secret(file, SETTING),)
        self._read_s = time.monotonic()

    @property
    def is_taken(self) -> bool:
        return self._file is not None

    def conversation(self, written: str) -> str:
        """The conversation that a request without an envelope names, as this worker knows it."""
        return PEER + written if self.is_taken and written else written

    def lineage_of(self, hint: Presented, *, request_id: str, phase: Phase, model: str, conversation: str) -> Lineage:
        """What `hint` says of the request that it came with: its parent, which is all the family that is known, and of
        its turn nothing. Raises Refused."""
        if phase is not Phase.CONTEXT:
            raise unproven(f"{ID_KEY} goes with context_only requests, and only with them")
        if not self.is_taken:
            raise unproven(f"{ID_KEY}: this worker has no key for it")
        try:
            self._verify(hint, request_id=request_id, model=model, conversation=conversation)
        except AffinityError as error:
            log.warning("a hint is refused", why=error.reason)
            raise unproven(str(error)) from error
        parent = self.conversation(hint.parent)
        # Who names itself as its parent has none.
        return Lineage() if hint.parent == conversation else Lineage(parent, parent)

    def _verify(self, hint: Presented, *, request_id: str, model: str, conversation: str) -> None:
        try:
            hint.verify(self._keys, model=model, conversation=conversation, request_id=request_id)
        except AffinityError:
            if not self._reread():
                raise
            hint.verify(self._keys, model=model, conversation=conversation, request_id=request_id)

    def _reread(self) -> bool:
        now_s = time.monotonic()
        if self._file is None or now_s - self._read_s < self._reread_s:
            return False
        self._read_s = now_s
        before = self._keys
        try:
            self._keys = (read_secret(self._file, SETTING),)
        except SettingsError as error:
            log.warning("the key stays as it was", why=str(error))
        return self._keys != before
