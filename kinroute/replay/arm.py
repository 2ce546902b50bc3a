"""One arm of a replay: which policy on how large a cache, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kinroute.replay.hints import Hints
from kinroute.replay.service import CostModel

STEP_MS = 30
"""How long a step takes in the open loop."""
HANDOFF_MS = 200
"""How long after its prefill the generation side has a context leg's pages."""
CONTEXT_LEG_S = (STEP_MS + HANDOFF_MS) / 1000
"""How long a context leg holds its prompt in the open loop, where it is admitted as it arrives."""


@dataclass(frozen=True, slots=True)
class Arm:
    """`policy`: a retention policy's name. Tiers in blocks; a cold one of 0 is not there. `tp`: ranks that carry out
    every plan. `warmup`: the share of the requests that is not counted, from 0 to below 1.

    `host_rate`, `disk_rate`: blocks a second that a rank copies to or from that tier, one copy after the other. The
    defaults are assumptions: 64 tokens of 131,072 bytes (32 layers, 8 KV heads of 128, 2 bytes each) a block, 25 GB/s
    to host memory (PCIe 4.0 x16) and 3 GB/s to disk (NVMe).
    `closed_loop`: arrivals wait for answers, and steps cost what `costs` say.
    """

    policy: str
    capacity_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    role: Literal["aggregated", "context"] = "aggregated"
    hints: Hints = field(default_factory=Hints)
    tp: int = 1
    warmup: float = 0.25
    closed_loop: bool = False
    host_rate: float = 3_000.0
    disk_rate: float = 350.0
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.capacity_blocks < 1 or min(self.host_blocks, self.disk_blocks) < 0:
            raise ValueError("a tier has so many blocks, the device at least one")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup is {self.warmup}: a share from 0 to below 1 is due")
        if self.tp < 1:
            raise ValueError(f"tp is {self.tp}: a number of ranks is due")
        if min(self.host_rate, self.disk_rate) <= 0.0:
            raise ValueError("a tier copies more than 0 blocks a second")
