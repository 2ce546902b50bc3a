"""What the edge of a replay tells the worker about conversations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class Hints:
    """`parent`: whose sub-agent a request's conversation is. `stop`: how each answer ended. `final`: that a
    conversation's last answer was its last."""

    parent: bool = True
    stop: bool = True
    final: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """From names with commas between them, or "none". Raises ValueError naming what it does not know."""
        known = [field.name for field in fields(cls)]
        named = [] if text.strip() == "none" else [name.strip() for name in text.split(",")]
        unknown = [name for name in named if name not in known]
        if unknown:
            raise ValueError(f"hints are none, or some of {', '.join(known)}: not {unknown[0]!r}")
        return cls(**{name: name in named for name in known})

    def __str__(self) -> str:
        return ",".join(field.name for field in fields(self) if getattr(self, field.name)) or "none"
