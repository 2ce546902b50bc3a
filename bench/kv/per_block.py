"""Drives the manager with one node and one hash per block through the same requests."""

from __future__ import annotations

import numpy as np

from bench.block_manager import SEED, Block, BlockManager, KeysOf
from bench.kv.laps import Laps, Part, Turn

CHUNK = 2048


class PerBlock:
    def __init__(self, num_pages: int, tokens_per_block: int, keys_of: KeysOf) -> None:
        self.block = tokens_per_block
        self.manager = BlockManager(num_pages, tokens_per_block, keys_of)

    @property
    def num_blocks(self) -> int:
        return self.manager.num_committed

    def serve(self, turn: Turn, laps: Laps) -> int:
        """From its match to its release; returns how many of its tokens were cached."""
        manager, block = self.manager, self.block
        prompt = turn.prompt
        laps.start()
        keys = manager.keys(prompt)
        # Of a prompt that must yield logits the last token is computed even where all of it is cached.
        blocks = manager.match(keys[: (len(prompt) - 1) // block])
        laps.lap(Part.MATCH)
        manager.hold(blocks)
        laps.lap(Part.RESERVE)
        cached = computed = len(blocks) * block
        while computed < len(prompt):
            start, computed = computed, min(computed + CHUNK, len(prompt))
            blocks += self._take(-(-computed // block) - len(blocks))
            laps.lap(Part.RESERVE)
            first, full = start // block, computed // block
            manager.commit(blocks[first:full], keys[first:full])
            laps.lap(Part.COMMIT)
        if len(turn.answer) > 1:
            first, full = len(keys), (len(prompt) + len(turn.answer) - 1) // block
            tokens = np.concatenate([prompt[first * block :], turn.answer[:-1]])
            laps.start()
            blocks += self._take(-(-(len(prompt) + len(turn.answer) - 1) // block) - len(blocks))
            laps.lap(Part.RESERVE)
            keys += manager.keys(tokens, keys[-1] if keys else SEED)
            manager.commit(blocks[first:full], keys[first:full])
            laps.lap(Part.COMMIT)
        manager.release(blocks)
        laps.lap(Part.RELEASE)
        return cached

    def make_room(self, tokens: int) -> None:
        """Leave the pages of so many tokens free."""
        self.manager.release(self._take(-(-tokens // self.block)))

    def pass_time(self) -> None:
        """Nothing here ages."""

    def _take(self, count: int) -> list[Block]:
        taken = self.manager.take(count)
        assert taken is not None, "the bench asked for more than there is"
        return taken
