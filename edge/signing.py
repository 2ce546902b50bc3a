"""Signs what a worker may believe of a link, of a leg, and of a turn that another worker serves."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from edge.core.prompt_hashes import PromptHashes
from edge.core.types import Lineage, TurnId
from edge.legs import REQUEST_TYPES, LegOrder
from enginelink.envelope import (
    LIFE_S,
    PURPOSE_LINK,
    PURPOSE_RETURN,
    PURPOSE_SUBMIT,
    Claims,
    Key,
    Signer,
    signing_key,
)


class EnvelopeSigner:
    """Signs with the newest of `keys` that may sign; without one, nothing is signed and no lineage is sent."""

    def __init__(self, edge_id: str, keys: Sequence[Key], clock: Callable[[], float] = time.time) -> None:
        self._edge_id = edge_id
        self._clock = clock
        self._hashes = PromptHashes()
        self._keys: Sequence[Key] = ()
        self._signers: dict[str, Signer] = {}
        self.use(keys)

    def use(self, keys: Sequence[Key]) -> None:
        """From now on these, and no others."""
        self._keys = keys
        self._signers = {key.key_id: Signer(key) for key in keys}

    def link(self, instance_id: str) -> str:
        return self._signed(PURPOSE_LINK, instance_id)

    def leg(self, order: LegOrder, instance_id: str) -> str:
        lineage = order.lineage
        return self._signed(
            PURPOSE_SUBMIT,
            instance_id,
            request_id=order.request_id,
            request_type=REQUEST_TYPES[order.phase],
            model=order.model,
            turn=order.turn_id,
            tenant=order.tenant,
            family=lineage.family,
            conversation=lineage.conversation,
            parent=lineage.parent or "",
            depth=lineage.depth,
            final=lineage.final,
            prompt_sha256=self._hashes.sha256(lineage.conversation, order.token_ids),
        )

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str, instance_id: str) -> str:
        """Another worker serves this turn of the conversation."""
        return self._signed(
            PURPOSE_RETURN,
            instance_id,
            turn=turn_id,
            tenant=tenant,
            family=lineage.family,
            conversation=lineage.conversation,
        )

    def _signed(self, purpose: str, instance_id: str, **members: Any) -> str:
        """For the worker `instance_id` alone, from now on; `members` of `Claims` say the rest."""
        now_s = int(self._clock())
        key = signing_key(self._keys, now_s)
        if key is None:
            return ""
        claims = Claims(purpose, self._edge_id, instance_id, now_s, now_s + LIFE_S, secrets.token_hex(8), **members)
        return self._signers[key.key_id].sign(claims)
