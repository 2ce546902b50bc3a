from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.core.engines import make_engine
from worker.core.config import ReusePolicy
from worker.core.conversations import Conversations, News, StopReason
from worker.core.types import Phase, RequestKey

TENANT, OTHER = b"tenant", b"other"


def children(registry: Conversations, parent: str) -> list[str]:
    return [child.id for child in registry.children(parent)]


def test_a_child_of_an_unknown_parent_waits_under_that_id() -> None:
    registry = Conversations()
    registry.admitted("child", TENANT, "parent")

    assert children(registry, "parent") == ["child"]
    assert registry.find("parent") is None


def test_a_generation_leg_that_tells_no_turn_leaves_the_last_one_known() -> None:
    registry = Conversations()
    registry.admitted("one", TENANT, None, "turn", b"prompt")
    registry.admitted("one", TENANT, None)

    assert registry.is_retry("one", "turn", b"")
    assert registry.is_retry("one", "", b"prompt")
    assert not registry.is_retry("one", "next turn", b"next prompt")


def test_children_keep_the_order_in_which_they_came() -> None:
    registry = Conversations()
    for child in ("b", "a", "c", "a"):
        registry.admitted(child, TENANT, "parent")

    assert children(registry, "parent") == ["b", "a", "c"]


def test_the_last_proven_parent_wins_and_a_request_without_one_changes_nothing() -> None:
    registry = Conversations()
    registry.admitted("child", TENANT, "first")
    registry.admitted("child", TENANT, "second")
    registry.admitted("child", TENANT, None)

    assert children(registry, "first") == []
    assert children(registry, "second") == ["child"]


def test_a_conversation_never_becomes_its_own_ancestor() -> None:
    registry = Conversations()
    registry.admitted("b", TENANT, "a")
    registry.admitted("c", TENANT, "b")

    registry.admitted("a", TENANT, "c")
    registry.admitted("b", TENANT, "b")

    a, b = registry.find("a"), registry.find("b")
    assert a is not None
    assert b is not None
    assert (a.parent, b.parent) == (None, "a")
    registry.check()


def test_a_full_register_forgets_the_longest_idle_one_of_the_tenant_that_holds_most() -> None:
    registry = Conversations(bound=3)
    for conversation, tenant in (("lone", OTHER), ("old", TENANT), ("new", TENANT)):
        registry.admitted(conversation, tenant, None)
        registry.leg_ended(conversation)
    registry.admitted("old", TENANT, None)
    registry.leg_ended("old")

    assert registry.admitted("next", OTHER, None) == ["new"]
    assert sorted(known.id for known in registry) == ["lone", "next", "old"]


def test_a_conversation_in_flight_is_not_forgotten() -> None:
    registry = Conversations(bound=1)
    registry.admitted("busy", TENANT, None)

    assert registry.admitted("next", TENANT, None) == []
    assert len(registry) == 2


def test_a_generation_leg_elsewhere_keeps_a_conversation_in_flight_until_the_edge_says_it_ended() -> None:
    registry = Conversations()
    registry.admitted("a", TENANT, None)
    registry.heard("a", News.GENERATING, StopReason.UNKNOWN, final=False)
    registry.leg_ended("a")
    conversation = registry.find("a")
    assert conversation is not None
    in_flight_before = conversation.is_in_flight

    registry.heard("a", News.ENDED, StopReason.TOOL_CALL, final=True)

    assert (in_flight_before, conversation.is_in_flight) == (True, False)
    assert (conversation.stop_reason, conversation.final) == (StopReason.TOOL_CALL, True)
    assert not registry.heard("stranger", News.CLOSED, StopReason.UNKNOWN, final=False)


def test_a_conversation_that_was_closed_while_it_generated_stays_closed_until_it_comes_back() -> None:
    registry = Conversations()
    registry.admitted("a", TENANT, None)
    registry.heard("a", News.GENERATING, StopReason.UNKNOWN, final=False)
    registry.heard("a", News.CLOSED, StopReason.UNKNOWN, final=True)
    registry.heard("a", News.ENDED, StopReason.END_OF_TURN, final=False)
    conversation = registry.find("a")
    assert conversation is not None
    assert conversation.final

    registry.admitted("a", TENANT, None)

    assert not conversation.final


def test_a_conversation_is_registered_when_admitted_and_its_context_ends_with_its_first_token() -> None:
    engine = make_engine(policy=ReusePolicy.PER_CONVERSATION, max_num_tokens=2)
    engine.submit(1, [1, 2, 3], phase=Phase.CONTEXT, max_tokens=5, conversation="child", parent="parent")
    assert len(engine.replica.conversations) == 0
    engine.step()
    child = engine.replica.conversations.find("child")
    assert child is not None
    assert (child.parent, child.is_in_flight, child.last_context_step) == ("parent", True, None)

    engine.step()
    assert (child.is_in_flight, child.last_context_step) == (True, 2)

    engine.scheduler.released(RequestKey(1))
    engine.step()
    assert not child.is_in_flight
    assert engine.replica.cache.tree.owners.blocks("child") == 1


def test_a_suspended_request_is_still_in_flight_and_a_cancel_ends_that() -> None:
    engine = make_engine(num_pages=4, policy=ReusePolicy.PER_CONVERSATION)
    engine.submit(1, [1, 1], max_tokens=7, conversation="old")
    engine.submit(2, [2, 2], max_tokens=7, conversation="young")
    while engine.scheduler.load.queued == 0 or len(engine.replica.conversations) < 2:
        engine.step()
    young = engine.replica.conversations.find("young")
    assert young is not None
    assert RequestKey(2) not in engine.replica.sequences
    assert young.is_in_flight

    engine.scheduler.cancel(RequestKey(2))
    engine.step()

    assert not young.is_in_flight


def test_what_a_conversation_found_is_not_its_own() -> None:
    engine = make_engine(num_pages=16, policy=ReusePolicy.PER_CONVERSATION)
    engine.submit(1, [1, 2, 3, 4, 5], conversation="parent")
    engine.run()
    engine.submit(2, [1, 2, 3, 4, 6, 7, 8], conversation="child", parent="parent")
    engine.run()

    tree = engine.replica.cache.tree
    assert (tree.owners.blocks("parent"), tree.owners.blocks("child")) == (2, 1)


names = st.sampled_from(["a", "b", "c", "d", "e"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(names, st.one_of(st.none(), names), st.sampled_from([TENANT, OTHER]), st.booleans())))
def test_the_register_stays_bounded_and_consistent(admissions: list[tuple[str, str | None, bytes, bool]]) -> None:
    registry = Conversations(bound=3)
    running: list[str] = []
    most_running = 0
    for conversation, parent, tenant, ends in admissions:
        registry.admitted(conversation, tenant, parent)
        running.append(conversation)
        most_running = max(most_running, len(set(running)))
        if ends:
            registry.context_ended(running[0], 1)
            registry.leg_ended(running.pop(0))
        registry.check()
        assert len(registry) <= max(3, most_running)
