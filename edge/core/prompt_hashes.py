"""SHA-256 of a conversation's prompts: a turn costs what it adds to the last one, not the whole prompt."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from edge.core.types import ConversationKey

MAX_BYTES = 256 << 20
ENTRY_BYTES = 800


class _State(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def copy(self) -> _State: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Known:
    """`state`: after all of `token_ids`; it is copied, never changed."""

    token_ids: bytes
    state: _State

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + ENTRY_BYTES


class PromptHashes:
    """The last prompt of each conversation with its hash state, within `max_bytes`; who asked longest ago goes first.

    Comparing a prompt with its beginning costs a tenth of hashing it. One that does not begin with the last is hashed
    whole.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[ConversationKey, _Known] = OrderedDict()

    def sha256(self, conversation: ConversationKey, token_ids: bytes) -> str:
        """In hexadecimal, as `enginelink.envelope.prompt_sha256`."""
        before = self._known.pop(conversation, None)
        if before is None:
            state: _State = hashlib.sha256(token_ids)
        else:
            self._bytes -= before.num_bytes
            if token_ids.startswith(before.token_ids):
                state = before.state.copy()
                state.update(memoryview(token_ids)[len(before.token_ids) :])
            else:
                state = hashlib.sha256(token_ids)
        self._keep(conversation, _Known(token_ids, state))
        return state.hexdigest()

    def _keep(self, conversation: ConversationKey, known: _Known) -> None:
        self._known[conversation] = known
        self._bytes += known.num_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._known.popitem(last=False)[1].num_bytes
