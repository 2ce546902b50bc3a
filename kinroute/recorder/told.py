"""The lines that an edge tells a recording (`edge.recordings`)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kinroute.replay.traces import Kind

Reason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled"]
Leg: TypeAlias = Literal["context", "generation"]


class ToldTurn(msgspec.Struct, frozen=True, tag_field="what", tag="turn", rename={"t_s": "t", "duration_s": "dur"}):
    """A request that ended. `t_s`: its arrival, by the stream's clock. Conversations are hashes. `leg`: None where both
    phases are in it. `blocks`: 8 bytes a whole block of the prompt."""

    t_s: float
    duration_s: float
    conversation: str
    parent: str | None
    family: str
    kind: Kind
    leg: Leg | None
    stop: Reason | None
    final: bool
    prompt_tokens: int
    output_tokens: int
    blocks: bytes


class ToldSign(msgspec.Struct, frozen=True, tag_field="what", tag="sign", rename={"now_s": "now"}):
    """The edge lives. `now_s`: by the stream's clock; `lost`: turns so far that it could not tell; `over`: it stops."""

    now_s: float
    lost: int
    over: bool = False


_decode = msgspec.json.Decoder(ToldTurn | ToldSign).decode


def decode(line: str) -> ToldTurn | ToldSign:
    """Raises ValueError where it is no such line."""
    told: ToldTurn | ToldSign = _decode(line)
    if isinstance(told, ToldTurn) and (len(told.blocks) % 8 or told.duration_s < 0 or told.output_tokens < 0):
        raise ValueError("a turn whose numbers cannot be")
    return told
