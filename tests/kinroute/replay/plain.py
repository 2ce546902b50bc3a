"""Played requests written by hand, of blocks of 4 tokens."""

from __future__ import annotations

from typing import Any

from kinroute.replay.plays import PlayedRequest


def asked(t_s: float, *blocks: tuple[int, int], output: int = 1, **members: Any) -> PlayedRequest:
    made: dict[str, Any] = {
        "duration_s": 1.0, "play": 0, "conversation": "a", "parent": None, "kind": "root", "stop": "tool",
        "answer_blocks": ((900 + int(t_s), -(-output // 4)),), "output_tokens": output, "block_tokens": 4,
        "is_last": False,
    }  # fmt: skip
    return PlayedRequest(t_s=t_s, prompt_blocks=blocks, **{**made, **members})
