"""Paths through the run tree: along a prompt from the root down, and from a run up to its root. Changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from worker.core.arrays import EMPTY, Int32s
from worker.core.runs import Hold, Match, PartMatch, Run, Segment
from worker.core.tiers import Tier

TOKEN_BYTES = 4
MAX_CANDIDATES = 32
"""Children that are looked at for the beginning of one block."""


def packed(tokens: Int32s) -> bytes:
    """The bytes of a prompt; no copy where they came over a wire as they are."""
    wire: object = tokens.base
    return wire if isinstance(wire, bytes) and len(wire) == tokens.nbytes else tokens.tobytes()


def descend(run: Run, length: int, prompt: bytes, max_blocks: int, block_bytes: int) -> Match:
    """From after `length` blocks of `run` along `prompt`, by whole blocks, at most `max_blocks`."""
    stop = min(len(prompt) // block_bytes, max_blocks) * block_bytes
    at = 0
    whole: bytearray | memoryview = run.tokens
    if length:
        whole = memoryview(whole)[length * block_bytes :]
    # One memcmp a run, no temporary: only the run in which the match ends is compared block by block.
    is_equal = prompt.startswith(whole, at)
    while is_equal and at + len(whole) <= stop:
        at += len(whole)
        newest = run.newest
        if newest is None or at == stop:
            return Match(run, run.pages.size, at // block_bytes)
        is_equal = prompt.startswith(newest.tokens, at)
        child = newest if is_equal else run.children.get(prompt[at : at + block_bytes])
        if child is None:
            return Match(run, run.pages.size, at // block_bytes)
        if child is not newest:
            is_equal = prompt.startswith(child.tokens, at)
        run = child
        whole = child.tokens
        length = 0
    same = _equal_bytes(whole, prompt, at, min(len(whole), stop - at)) // block_bytes
    return Match(run, length + same, at // block_bytes + same)


def match_within(match: Match, tokens: Int32s, block_bytes: int, may_copy: Callable[[int], bool]) -> PartMatch | None:
    """The block behind `match` that shares most of its beginning with `tokens`, the rest of the prompt.

    Only blocks of the device, whose page `may_copy`.
    """
    run = match.run
    if run is None or not len(tokens):
        return None
    index = 0
    if match.length < run.length:
        candidates, index = [run], match.length
    elif run.children:
        candidates = list(itertools.islice(run.children.values(), MAX_CANDIDATES))
    else:
        return None
    start, wanted = index * block_bytes, tokens[: block_bytes // TOKEN_BYTES].tobytes()
    best: PartMatch | None = None
    most = 0
    for candidate in candidates:
        if candidate.tokens[start : start + TOKEN_BYTES] != wanted[:TOKEN_BYTES]:
            continue
        block = memoryview(candidate.tokens)[start : start + block_bytes]
        same = _equal_bytes(block, wanted, 0, len(wanted)) // TOKEN_BYTES
        if same > most and index < candidate.ends[Tier.DEVICE] and may_copy(int(candidate.pages.view[index])):
            best, most = PartMatch(candidate, index, same), same
    return best


def newly_held(run: Run | None, length: int) -> int:
    """How many blocks of the device a hold of the first `length` blocks of `run` would keep that no other keeps."""
    # What is on the device, and what is held, are each the beginning of any path.
    while run is not None and not run.ends[0]:
        run = run.parent
        length = run.pages.size if run is not None else 0
    if run is None:
        return 0
    warm = run.start + min(length, run.ends[0])
    above: Run | None = run
    while above is not None and not above.held_length:
        above = above.parent
    held = above.start + above.held_length if above is not None else 0
    return max(0, warm - held)


def path_pages(hold: Hold | Match) -> Int32s:
    """Pages of the path to there, from the root, each in the tier that its block is in."""
    run = hold.run
    if run is None:
        return EMPTY
    # Arrays are buffers, which their type does not say.
    parts: list[Any] = [run.pages.view[: hold.length]]
    ancestor = run.parent
    while ancestor is not None:
        parts.append(ancestor.pages.view)
        ancestor = ancestor.parent
    parts.reverse()
    return np.frombuffer(b"".join(parts), np.int32)


def segments(run: Run | None, length: int, start: int = 0) -> list[Segment]:
    """The path to the first `length` blocks of `run`, from its block `start` on, from the root down."""
    parts: list[Segment] = []
    while run is not None and run.start + length > start:
        first = max(0, start - run.start)
        if first < length:
            parts.append(Segment(run, first, length))
        run = run.parent
        length = run.length if run is not None else 0
    return parts[::-1]


def cold_segments(run: Run | None, length: int) -> list[Segment]:
    """What of the path to there is not on the device, from the root down."""
    parts: list[Segment] = []
    while run is not None and run.ends[0] < length:
        parts.append(Segment(run, run.ends[0], length))
        if run.ends[0]:
            break
        run = run.parent
        length = run.length if run is not None else 0
    return parts[::-1]


def below(run: Run) -> Iterator[Run]:
    """Every run that hangs below `run`."""
    left = list(run.children.values())
    while left:
        one = left.pop()
        left += one.children.values()
        yield one


def _equal_bytes(one: bytearray | memoryview, other: bytes, at: int, count: int) -> int:
    """How many of the first `count` bytes of `one` are those of `other` from `at` on."""
    if not count:
        return 0
    differ = np.frombuffer(one, np.uint8, count) != np.frombuffer(other, np.uint8, count, at)
    first = int(differ.argmax())
    return first if differ[first] else count
