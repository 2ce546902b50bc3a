"""Envelopes from edges: who opened a link, and whose child a request is. Checked once, on rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.types import Phase

LEEWAY_S = 5
MAX_SEEN = 1_048_576
PURPOSE_LINK = "link"
REQUEST_TYPES = {
    Phase.CONTEXT: "context_only",
    Phase.GENERATION: "generation_only",
    Phase.AGGREGATED: "context_and_generation",
}


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a verified envelope says of a request; empty: nothing is known."""

    parent: str | None = None
    family: str = ""
    turn: str = ""


NO_LINEAGE = Lineage()
