"""What a session must be, beyond its types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinroute.replay.traces import Session, TracedRequest

MAX_PROMPT_TOKENS = 2**31


def fault_of(session: Session) -> str | None:
    """What was expected instead, the first of it; None where the session is sound.

    Requests come by arrival. Parents are conversations of the session, and nobody is its own ancestor. Block ids are
    chained: an id has one id in front of it, the same wherever it stands.
    """
    if session.block_tokens < 1:
        return f"block_tokens of 1 or more, not {session.block_tokens}"
    if not session.requests:
        return "a session with requests"
    before_s = 0.0
    for index, request in enumerate(session.requests):
        fault = _fault_of(request, session.block_tokens, before_s)
        if fault is not None:
            return f"{fault}, in request {index + 1}"
        before_s = request.t_s
    return _fault_of_parents(session.requests) or _fault_of_chain(request.blocks for request in session.requests)


def _fault_of(request: TracedRequest, block_tokens: int, before_s: float) -> str | None:
    if not 0 <= request.t_s < math.inf:
        return f"a time from 0 on, not {request.t_s}"
    if request.t_s < before_s:
        return f"requests by arrival, but {request.t_s} s comes after {before_s} s"
    if not 0 <= request.duration_s < math.inf:
        return f"a duration from 0 on, not {request.duration_s}"
    if request.output_tokens < 0:
        return f"output_tokens from 0 on, not {request.output_tokens}"
    if request.kind == "root" and request.parent is not None:
        return f"a root without a parent, but it has {request.parent!r}"
    for first, count in request.blocks:
        if first < 0 or count < 1:
            return f"runs of blocks as [first id from 0 on, count from 1 on], not [{first}, {count}]"
    if request.num_blocks * block_tokens > MAX_PROMPT_TOKENS:
        return f"a prompt of at most {MAX_PROMPT_TOKENS} tokens, not {request.num_blocks * block_tokens}"
    return None


def _fault_of_parents(requests: Iterable[TracedRequest]) -> str | None:
    parents: dict[str, set[str]] = {}
    for request in requests:
        of = parents.setdefault(request.conversation, set())
        if request.parent is not None:
            of.add(request.parent)
    for conversation, named in parents.items():
        for parent in named - parents.keys():
            return f"a parent that is a conversation of the session, not {parent!r}, in conversation {conversation!r}"
    looping = _somebody_above_itself(parents)
    return None if looping is None else f"no conversation among its own ancestors, but {looping!r} is"


def _somebody_above_itself(parents: Mapping[str, set[str]]) -> str | None:
    """Conversations without a parent left are taken away until none is; who remains is in a cycle or below one."""
    left = {conversation: set(named) for conversation, named in parents.items()}
    children: dict[str, list[str]] = {}
    for conversation, named in left.items():
        for parent in named:
            children.setdefault(parent, []).append(conversation)
    free = [conversation for conversation, named in left.items() if not named]
    while free:
        parent = free.pop()
        del left[parent]
        for child in children.get(parent, ()):
            left[child].discard(parent)
            if not left[child]:
                free.append(child)
    return next(iter(left), None)


def _fault_of_chain(prompts: Iterable[Sequence[tuple[int, int]]]) -> str | None:
    before: dict[int, int] = {}
    """What stands in front of the first id of each run but a prompt's first: recordings exist where a prompt that lost
    its beginning goes on with the ids that it had."""
    ends: dict[int, int] = {}
    """By first id, the end of the longest run."""
    for blocks in prompts:
        last: int | None = None
        for first, count in blocks:
            if last is not None and before.setdefault(first, last) != last:
                return _unchained(first, before[first], last)
            ends[first] = max(ends.get(first, 0), first + count)
            last = first + count - 1
    # An id inside some run has its neighbour in front of it; one that begins a run elsewhere must have that too.
    reached = 0
    for first in sorted(ends):
        if first < reached and before.get(first, first - 1) != first - 1:
            return _unchained(first, before[first], first - 1)
        reached = max(reached, ends[first])
    return None


def _unchained(block: int, one: int, other: int) -> str:
    return f"chained block ids, but block {block} follows block {one} here and block {other} there"
