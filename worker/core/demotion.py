"""Which children are finished when their parent returns. Pure; who demotes them is the replica."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from worker.core.conversations import Conversation, Conversations


class Unfinished(enum.StrEnum):
    """Why a child is not demoted at this return; it is asked again at the next."""

    IN_FLIGHT = "in flight"
    DESCENDANT_IN_FLIGHT = "a descendant is in flight"
    NOT_IDLE = "not idle for long enough"
    DESCENDANT_NOT_IDLE = "a descendant is not idle for long enough"
    DEMOTED = "demoted already"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`group`: the child's descendants, deepest first, and then itself. `unfinished`: why not; None: it is finished.

    `steps_left`: plans until the youngest of them is idle.
    """

    child: Conversation
    group: tuple[Conversation, ...]
    unfinished: Unfinished | None
    steps_left: int = 0


def finished(conversations: Conversations, parent: str, step: int, min_idle_steps: int) -> list[Verdict]:
    """Of those children of `parent` that are to be demoted now, in the order in which they came."""
    asked = [_verdict(conversations, child, step, min_idle_steps) for child in conversations.open_children(parent)]
    return [verdict for verdict in asked if verdict.unfinished is None]


def verdicts(conversations: Conversations, parent: str, step: int, min_idle_steps: int) -> list[Verdict]:
    """Of each child of `parent`, in the order in which they came."""
    return [_verdict(conversations, child, step, min_idle_steps) for child in conversations.children(parent)]


def descendants(conversations: Conversations, conversation: str) -> list[Conversation]:
    """Deepest first: nobody comes before those below it."""
    found: list[Conversation] = []
    left = [conversation]
    while left:
        children = conversations.children(left.pop())
        found += children
        left += [child.id for child in children]
    return found[::-1]


def _verdict(conversations: Conversations, child: Conversation, step: int, min_idle_steps: int) -> Verdict:
    group = (*descendants(conversations, child.id), child) if conversations.has_children(child.id) else (child,)
    if all(one.demoted for one in group):
        return Verdict(child, group, Unfinished.DEMOTED)
    if child.is_in_flight:
        return Verdict(child, group, Unfinished.IN_FLIGHT)
    if any(one.is_in_flight for one in group):
        return Verdict(child, group, Unfinished.DESCENDANT_IN_FLIGHT)
    left = {one.id: _steps_left(one, step, min_idle_steps) for one in group}
    if left[child.id]:
        return Verdict(child, group, Unfinished.NOT_IDLE, max(left.values()))
    if any(left.values()):
        return Verdict(child, group, Unfinished.DESCENDANT_NOT_IDLE, max(left.values()))
    return Verdict(child, group, None)


def _steps_left(conversation: Conversation, step: int, min_idle_steps: int) -> int:
    """A conversation that never had a context here has nothing to wait for."""
    last = conversation.last_context_step
    return 0 if last is None else max(0, last + min_idle_steps - step)
