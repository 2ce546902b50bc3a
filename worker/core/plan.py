"""A plan: one scheduler step's whole input, and all that ever changes a rank's state.

Rank 0 makes it by acting on its own replica and noting each act; the others repeat the acts in their order. It travels
as MessagePack.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from worker.core.arrays import Int32s
from worker.core.config import RetentionPolicy
from worker.core.conversations import News, StopReason


class Act(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """One change. `key` is the request's."""


class Sampled(Act, frozen=True, tag="s"):
    """Tokens that the last step sampled: they are known to every rank from here on."""

    keys: tuple[int, ...]
    token_ids: tuple[int, ...]


class Admit(Act, frozen=True, tag="a"):
    """A request begins to run behind the match that rank 0 found: `length` blocks of run number `run` (0: nothing).

    `token_ids`: little-endian int32 of what follows the `matched` tokens; the ranks have the rest. `commit_until`:
    blocks that end behind this many tokens are never committed. `copy`: (run, block, tokens), where the match ends
    inside that block of that run: its page is copied. `resumed`: it was suspended, and is known to its conversation.
    `worth`: from which block on its blocks have which priority, for how many ms; the default where nothing is said.
    `turn`, `prompt_hash`: by which a retry is known.
    """

    key: int
    scope: bytes
    run: int
    length: int
    matched: int
    token_ids: bytes
    commit_until: int
    copy: tuple[int, int, int] | None = None
    conversation: str = ""
    parent: str | None = None
    prefills: bool = True
    resumed: bool = False
    worth: tuple[tuple[int, int, int], ...] = ()
    turn: str = ""
    prompt_hash: bytes = b""


class Load(Act, frozen=True, tag="l"):
    """Up to `count` of the blocks that this request found in colder tiers begin to come to the device."""

    key: int
    count: int


class Loaded(Act, frozen=True, tag="L"):
    """All blocks that this request found are readable on the device."""

    key: int


class Refill(Act, frozen=True, tag="f"):
    """Blocks that this request waited for are lost; `token_ids` are those that it must compute now."""

    key: int
    token_ids: bytes


class Copied(Act, frozen=True, tag="C"):
    """Copy `number` is over on every rank; its first `good` pages arrived on all of them."""

    number: int
    good: int


class Off(Act, frozen=True, tag="o"):
    """A tier failed too often on some rank: nobody uses it any more."""

    tier: int


class Return(Act, frozen=True, tag="R"):
    """The first chunk of this request is in this plan: its conversation returned, if it is one that others call
    parent."""

    key: int


class Returned(Act, frozen=True, tag="q"):
    """Another worker served a turn of this conversation."""

    conversation: str
    turn: str


class Gather(Act, frozen=True, tag="g"):
    """Take `count` of the pages that a pull is going to fill."""

    key: int
    count: int


class Pull(Act, frozen=True, tag="p"):
    """Fill the pages behind the match, which it has taken, from the session `source`."""

    key: int
    source: bytes


class Arrived(Act, frozen=True, tag="A"):
    """Every rank has the pulled pages."""

    key: int


class Chunk(Act, frozen=True, tag="c"):
    """The next `count` tokens of this request are part of this step's forward."""

    key: int
    count: int
    sample: bool


class Pin(Act, frozen=True, tag="P"):
    """This step's forward completes a context leg: its pages may be fetched from here on, until its release."""

    key: int


class Release(Act, frozen=True, tag="r"):
    """The request is over here, whatever the reason; what it committed stays."""

    key: int


class Suspend(Act, frozen=True, tag="S"):
    """Like a release, but the request will be admitted again."""

    key: int


class Abandon(Act, frozen=True, tag="b"):
    """A suspended request of this conversation will not be admitted again."""

    conversation: str


class Heard(Act, frozen=True, tag="h"):
    """What the edge told of a conversation."""

    conversation: str
    news: News
    reason: StopReason
    final: bool


class Clear(Act, frozen=True, tag="x"):
    """Drop what no request holds: every block, those of one scope, or those that these conversations own."""

    scope: bytes | None = None
    owners: tuple[str, ...] | None = None


class Learned(Act, frozen=True, tag="t"):
    """What idle conversations are worth from here on, by class (worker.core.returns.classes): `values` has a row of
    little-endian uint16 by bucket of ages for each of `groups`."""

    groups: tuple[int, ...]
    values: bytes


class Switch(Act, frozen=True, tag="w"):
    """Blocks are kept by this policy from here on: the configured one, or `lru` while that does better."""

    policy: RetentionPolicy


AnyAct: TypeAlias = (
    Sampled
    | Admit
    | Load
    | Loaded
    | Refill
    | Copied
    | Off
    | Return
    | Returned
    | Gather
    | Pull
    | Arrived
    | Chunk
    | Pin
    | Release
    | Suspend
    | Abandon
    | Heard
    | Clear
    | Learned
    | Switch
)


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """`number` rises by one; `time_ms` is rank 0's monotonic clock."""

    number: int
    time_ms: int
    acts: tuple[AnyAct, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Plan)


def encode(plan: Plan) -> bytes:
    return _encoder.encode(plan)


def decode(data: bytes) -> Plan:
    """Raises msgspec.ValidationError or DecodeError where `data` is no plan."""
    return _decoder.decode(data)


def pack(token_ids: Int32s) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()


def unpack(token_ids: bytes) -> Int32s:
    return np.frombuffer(token_ids, "<i4").astype(np.int32, copy=False)
