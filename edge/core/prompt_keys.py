"""The keys of a prompt's blocks, computed only where the conversation's last prompt does not hold them already."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edge.core.resident import KEY_BYTES, Prints, prints_of
from edge.core.types import ConversationKey, Lineage
from enginelink.block_keys import TOKEN_BYTES, BlockKey, BlockScope, block_keys, scope_key

MAX_BYTES = 256 << 20
ENTRY_BYTES = 500


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids`: packed little-endian uint32. `salt`: what a worker gets as `cache_salt`."""

    token_ids: bytes
    salt: bytes


@dataclass(frozen=True, slots=True)
class _Known:
    token_ids: bytes
    keys: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + len(self.keys) + ENTRY_BYTES


_Name: TypeAlias = tuple[ConversationKey, bytes, int]


class PromptKeys:
    """The last prompt of each conversation with its keys, within `max_bytes`; who was asked for longest ago goes first.

    SHA-256 costs about 0.4 µs a block of 32 tokens, comparing it with the last prompt a hundredth of that.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[_Name, _Known] = OrderedDict()

    def prints(self, lineage: Lineage, prompt: Prompt, tokens_per_block: int) -> Prints:
        """Of the prompt's whole blocks. A child's first prompt goes on from what it shares with its parent's last."""
        name = (lineage.conversation, prompt.salt, tokens_per_block)
        known = self._known.get(name)
        if known is None and lineage.parent is not None:
            known = self._known.get((lineage.parent, prompt.salt, tokens_per_block))
        block_bytes = TOKEN_BYTES * tokens_per_block
        shared = 0 if known is None else _shared_bytes(known.token_ids, prompt.token_ids) // block_bytes
        keys = b"" if known is None else known.keys[: KEY_BYTES * shared]
        previous = BlockKey(keys[-KEY_BYTES:]) if keys else scope_key(BlockScope(prompt.salt))
        rest = memoryview(prompt.token_ids)[block_bytes * shared :]
        keys += b"".join(block_keys(previous, rest, tokens_per_block))
        self._keep(name, _Known(prompt.token_ids, keys))
        return prints_of(keys)

    def _keep(self, name: _Name, known: _Known) -> None:
        before = self._known.pop(name, None)
        if before is not None:
            self._bytes -= before.num_bytes
        self._known[name] = known
        self._bytes += known.num_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._known.popitem(last=False)[1].num_bytes


def _shared_bytes(one: bytes, other: bytes) -> int:
    """Of whole tokens that both begin with."""
    size = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, "<u4", size) != np.frombuffer(other, "<u4", size)
    first = int(differ.argmax()) if size else 0
    return TOKEN_BYTES * (first if size and differ[first] else size)
