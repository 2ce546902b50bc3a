"""What the run tree is compared with: one node and one hash per block, as most engines keep their cache.

A dict from the key of a block (SHA-256 over the key before it and its tokens) to the block; reference counts; and a
doubly linked list of the blocks that nobody holds, least recently let go first. It knows nothing of tiers, priorities,
owners and events, so it does less than what it is compared with. Written as well as this design allows: nothing is
searched for, and keys come in two ways, as vLLM makes them by default and as cheaply as one key per block can be had.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32s: TypeAlias = npt.NDArray[np.int32]
KeysOf: TypeAlias = Callable[[Int32s, int, bytes], list[bytes]]
"""The keys of the full blocks behind a key: (token ids, tokens in a block, that key)."""
SEED = b"\0" * 32
"""Stands before a prompt's first block."""


def pickled_keys(token_ids: Int32s, block: int, key: bytes) -> list[bytes]:
    """As vLLM: each over the pickle of the key before it and a tuple of tokens."""
    tokens = token_ids.tolist()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - block + 1, block):
        fields = (key, tuple(tokens[start : start + block]), None)
        key = sha256(pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        keys.append(key)
    return keys


def byte_keys(token_ids: Int32s, block: int, key: bytes) -> list[bytes]:
    """Each over the key before it and the tokens' bytes."""
    tokens = token_ids.tobytes()
    size = block * token_ids.itemsize
    keys: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        key = sha256(key + tokens[start : start + size]).digest()
        keys.append(key)
    return keys


class Block:
    """One page. `key` is None while it holds nothing committed. The neighbours are set while nobody holds it."""

    __slots__ = ("after", "before", "holders", "key", "page")

    before: Block
    after: Block

    def __init__(self, page: int) -> None:
        self.page = page
        self.key: bytes | None = None
        self.holders = 0


class _Unheld:
    """The list of unheld blocks, as a ring around an end that is no page."""

    def __init__(self) -> None:
        self.end = Block(-1)
        self.end.before = self.end.after = self.end

    def append(self, block: Block) -> None:
        end = self.end
        last = end.before
        last.after = end.before = block
        block.before, block.after = last, end

    def prepend(self, block: Block) -> None:
        end = self.end
        first = end.after
        first.before = end.after = block
        block.before, block.after = end, first

    @staticmethod
    def remove(block: Block) -> None:
        before, after = block.before, block.after
        before.after, after.before = after, before

    def __iter__(self) -> Iterator[Block]:
        block = self.end.after
        while block is not self.end:
            yield block
            block = block.after


class BlockManager:
    """`keys`, `match`, `hold` what was found, `take` the rest, `commit` it once computed, `release` all of it."""

    def __init__(self, num_pages: int, tokens_per_block: int, keys_of: KeysOf = pickled_keys) -> None:
        self._block = tokens_per_block
        self._keys_of = keys_of
        self._of_key: dict[bytes, Block] = {}
        self._unheld = _Unheld()
        self.num_unheld = num_pages
        for page in range(num_pages):
            self._unheld.append(Block(page))

    @property
    def num_committed(self) -> int:
        return len(self._of_key)

    def keys(self, token_ids: Int32s, previous: bytes = SEED) -> list[bytes]:
        return self._keys_of(token_ids, self._block, previous)

    def match(self, keys: Sequence[bytes]) -> list[Block]:
        """The committed blocks of the longest prefix."""
        of_key = self._of_key
        found: list[Block] = []
        for key in keys:
            block = of_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Keep committed blocks from being evicted."""
        remove = self._unheld.remove
        for block in blocks:
            if block.holders == 0:
                remove(block)
                self.num_unheld -= 1
            block.holders += 1

    def take(self, count: int) -> list[Block] | None:
        """`count` held blocks to fill, those least recently let go, whose content is forgotten. None: too few."""
        if count > self.num_unheld:
            return None
        unheld = self._unheld
        taken: list[Block] = []
        for _ in range(count):
            block = unheld.end.after
            unheld.remove(block)
            if block.key is not None:
                del self._of_key[block.key]
                block.key = None
            block.holders = 1
            taken.append(block)
        self.num_unheld -= count
        return taken

    def commit(self, blocks: Sequence[Block], keys: Sequence[bytes]) -> None:
        """These blocks are computed. What somebody else committed first stays, and ours is free after its release."""
        of_key = self._of_key
        for block, key in zip(blocks, keys, strict=True):
            if of_key.setdefault(key, block) is block:
                block.key = key

    def release(self, blocks: Sequence[Block]) -> None:
        """A whole prompt in its order. Its end leaves first; what was never committed, at once."""
        unheld = self._unheld
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders == 0:
                if block.key is None:
                    unheld.prepend(block)
                else:
                    unheld.append(block)
                self.num_unheld += 1

    def check(self) -> None:
        """Every promise of this module, by walking everything."""
        unheld = list(self._unheld)
        assert len(unheld) == self.num_unheld, "unheld blocks are counted wrongly"
        assert all(block.holders == 0 for block in unheld), "a held block could be evicted"
        assert all(block.key == key for key, block in self._of_key.items()), "a block under another one's key"
        pages = {block.page for block in chain(unheld, self._of_key.values())}
        assert -1 not in pages, "the end of the list is no page"
        for block in unheld:
            assert block.key is None or self._of_key[block.key] is block, "a key that finds another block"
