"""A plot as plotly takes it, and its colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kinroute.replay.arguments import OPTIMUM

# Okabe and Ito's colours: told apart by colour-blind readers too, on white and on black.
BLUE, ORANGE, GREEN, SKY, PURPLE, RED, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#56b4e9",
    "#cc79a7",
    "#d55e00",
    "#8c8c8c",
)
POLICY_COLOURS = {"lru": GREY, "subagent": ORANGE, "return_index": BLUE, OPTIMUM: GREEN}
DASHES = {OPTIMUM: "dash"}
MARKERS = {"lru": "circle", "subagent": "square", "return_index": "diamond", OPTIMUM: "triangle-up"}


@dataclass(frozen=True, slots=True)
class Figure:
    """`says`: what it shows, in a sentence with its main numbers."""

    title: str
    says: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
