"""How long an answer took, where a trace does not say. An assumption: it changes when requests overlap, no content."""

from __future__ import annotations

FIRST_TOKEN_S = 1.0
EVERY_TOKEN_S = 0.03


def answered_s(output_tokens: int) -> float:
    return FIRST_TOKEN_S + EVERY_TOKEN_S * output_tokens
