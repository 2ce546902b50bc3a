"""What the edge remembers of what it sent."""

from __future__ import annotations

from edge.core.fleet import Role, Worker
from edge.core.prefix_index import PrefixIndex
from edge.core.types import ConversationKey, WorkerId

ONE, TWO, THREE = (ConversationKey(name) for name in ("one", "two", "three"))


def make_worker(name: str = "a:1", instance_id: str = "1") -> Worker:
    return Worker(WorkerId(name), Role.CONTEXT, ready=True, instance_id=instance_id)


def test_the_last_note_counts_for_each_worker_and_conversation() -> None:
    index, worker, other = PrefixIndex(), make_worker(), make_worker("b:1")
    index.note(ONE, worker, 10)
    index.note(ONE, other, 7)
    index.note(ONE, worker, 4)

    assert (index.tokens(ONE, worker), index.tokens(ONE, other), index.tokens(TWO, worker)) == (4, 7, 0)


def test_a_worker_that_started_again_has_nothing() -> None:
    index = PrefixIndex()
    index.note(ONE, make_worker(instance_id="1"), 10)

    assert index.tokens(ONE, make_worker(instance_id="2")) == 0


def test_what_was_noted_longest_ago_is_forgotten() -> None:
    index, worker = PrefixIndex(max_entries=2), make_worker()
    for conversation in (ONE, TWO, ONE, THREE):
        index.note(conversation, worker, 1)

    assert [index.tokens(conversation, worker) for conversation in (ONE, TWO, THREE)] == [1, 0, 1]
