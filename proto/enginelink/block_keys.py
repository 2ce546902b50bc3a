"""The key of a KV block: what edge and worker both call the same tokens in the same place. Pure.

A key is the SHA-256 of the key before it and of this block's fields, each framed by its length: so it names the block
and everything in front of it, and no field can pass for another. The first link of a chain holds the scope: who may
share blocks (`salt`) and what else changes their content (`adapter`, the digests of a prompt's images and sounds).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes."""
TOKEN_BYTES = 4
_VERSION = b"kinroute block key 1"


@dataclass(frozen=True, slots=True)
class BlockScope:
    """Blocks of different scopes never have one key. `multimodal`: digests, in the prompt's order."""

    salt: bytes = b""
    adapter: str = ""
    multimodal: tuple[bytes, ...] = ()


def scope_key(scope: BlockScope) -> BlockKey:
    """What stands before the first block of a prompt in `scope`."""
    digest = hashlib.sha256()
    for part in (_VERSION, scope.salt, scope.adapter.encode(), *scope.multimodal):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockKey(digest.digest())


def block_keys(previous: BlockKey, token_ids: bytes | memoryview, tokens_per_block: int) -> Sequence[BlockKey]:
    """The keys of the whole blocks that follow `previous`, in order; a rest at the end has none.

    `previous`: the key of the block before, or `scope_key` before the first. `token_ids`: packed little-endian uint32.
    A prompt that grew needs only what is new: go on from the last key that is known.
    """
    block_bytes = tokens_per_block * TOKEN_BYTES
    frame = block_bytes.to_bytes(8, "little")
    tokens = bytes(token_ids)
    fresh = hashlib.sha256()
    keys: list[BlockKey] = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        digest = fresh.copy()
        digest.update(previous + frame + tokens[start : start + block_bytes])
        previous = BlockKey(digest.digest())
        keys.append(previous)
    return keys
