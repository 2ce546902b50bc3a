"""Claims: which conversation let go of a run last, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.core.conversations import Conversation
from worker.core.returns.classes import EVERYBODY

if TYPE_CHECKING:
    from worker.core.runs import Run


@dataclass(slots=True, eq=False)
class Claim:
    """One conversation's, or that of one request that named none: `known` is None then.

    `number`: in the order of making. `runs`: those that it let go of last, by number. `value`: what each of them is
    worth. `group`: its class. Times are plan time. `ended_ms`: when its last request was over; `since_ms`: from when
    its age counts; `counted_ms`: up to where its idle time was told to the learner; `due_ms`: when it enters the next
    bucket of ages, None: nobody waits for that. `turns`, `output_tokens`, `gap_ms`: see `Features`; `prompt_tokens`:
    of its last request. `parent`: in whose brood it is counted.
    """

    number: int
    known: Conversation | None
    runs: dict[int, Run] = field(default_factory=dict)
    value: int = 0
    group: int = EVERYBODY
    bucket: int = 0
    in_flight: bool = False
    ended_ms: int = 0
    since_ms: int = 0
    counted_ms: int = 0
    due_ms: int | None = None
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gap_ms: int | None = None
    parent: str | None = None
