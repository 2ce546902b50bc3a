"""What is told of a request whose life ended, to whoever listens to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge.core.life_events import Phase
from edge.core.types import FinishReason, Turn


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """`phase`: AGGREGATED is both phases, wherever they ran; else the one leg that its caller asked for alone.

    Times are the event loop's. `reason` None: it failed, or nobody waited for it.
    """

    turn: Turn
    phase: Phase
    began_s: float
    ended_s: float
    reason: FinishReason | None
    output_tokens: int


class EndListener(Protocol):
    """Called on the event loop for each request that was begun, once, when it is over."""

    def ended(self, ended: EndedTurn) -> None: ...
