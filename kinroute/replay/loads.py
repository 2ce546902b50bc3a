"""A load: which traces are played how. Each process makes it anew, always alike."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from kinroute.replay.plays import PlayedRequest, as_recorded, replay
from kinroute.replay.readers import read_sessions


@dataclass(frozen=True, slots=True)
class Load:
    """`lanes` sessions alive at a time, in an order drawn from `seed`, idle gaps cut to `gap_s`. All three are None for
    a worker's recording, which is played once as it stands.

    `block_tokens`: for traces that do not say it themselves.
    """

    traces: tuple[Path, ...]
    block_tokens: int | None
    requests: int
    gap_s: float | None
    lanes: int | None
    seed: int | None

    @property
    def is_recorded(self) -> bool:
        return self.seed is None

    @property
    def shape(self) -> str:
        """All but the seed."""
        return "as recorded" if self.gap_s is None else f"gap {self.gap_s:g} s, {self.lanes} lanes"

    @property
    def name(self) -> str:
        return self.shape if self.seed is None else f"{self.shape}, seed {self.seed}"

    def played(self) -> list[PlayedRequest]:
        """By arrival. Raises OSError, or TraceError where a file is none."""
        sessions = read_sessions(self.traces, block_tokens=self.block_tokens)
        if self.lanes is None or self.gap_s is None:
            return as_recorded(sessions)[: self.requests]
        endless = replay(sessions, alive=self.lanes, longest_gap_s=self.gap_s, draws=random.Random(self.seed))
        return list(itertools.islice(endless, self.requests))
