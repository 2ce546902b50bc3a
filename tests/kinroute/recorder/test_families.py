"""Recorded turns become sessions: who is related is together, under small ids, in the order of arrival."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinroute.recorder.families import Families
from kinroute.recorder.told import ToldTurn, decode
from kinroute.replay.checks import fault_of
from kinroute.replay.traces import Session


def turn(conversation: str, *blocks: int, **more: Any) -> ToldTurn:
    """`blocks`: as the edge names them."""
    keys = base64.b64encode(b"".join(block.to_bytes(8, "little") for block in blocks)).decode()
    parent = more.pop("parent", None)
    told = {
        "what": "turn",
        "t": 0.0,
        "dur": 1.0,
        "conversation": conversation,
        "parent": parent,
        "family": parent or conversation,
        "kind": "sub" if parent else "root",
        "leg": None,
        "stop": "stop",
        "final": False,
        "prompt_tokens": 2 * len(blocks),
        "output_tokens": 5,
        "blocks": keys,
    }
    made = decode(json.dumps(told | more))
    assert isinstance(made, ToldTurn)
    return made


def sessions_of(*turns: tuple[float, ToldTurn]) -> list[Session]:
    """Of turns with the time at which each began."""
    written: list[Session] = []
    families = Families(2, written.append)
    for began_s, one in turns:
        families.add(one, began_s)
    families.close()
    assert [fault_of(session) for session in written] == [None] * len(written)
    assert len(families) == len(written)
    return written


def test_a_family_is_a_session_and_strangers_are_another() -> None:
    own, stranger = sessions_of(
        (10.0, turn("mother", 7, 8, stop="tool_calls")),
        (12.0, turn("daughter", 7, 9, parent="mother")),
        (13.0, turn("other", 7, 8)),
        (15.0, turn("mother", 7, 8, 5)),
    )

    assert [(one.conversation, one.parent, one.kind, one.t_s, one.stop) for one in own.requests] == [
        ("c0", None, "root", 0.0, "tool"),
        ("c1", "c0", "sub", 2.0, "end"),
        ("c0", None, "root", 5.0, "end"),
    ]
    assert [one.blocks for one in own.requests] == [((0, 2),), ((0, 1), (2, 1)), ((0, 2), (3, 1))]
    assert (own.block_tokens, own.source) == (2, "recorded")
    assert [one.blocks for one in stranger.requests] == [((0, 2),)]


def test_requests_are_in_the_order_of_arrival_though_they_end_in_another() -> None:
    (session,) = sessions_of((5.0, turn("a", 1, dur=1.0)), (2.0, turn("a", 2, dur=9.0)))

    assert [(one.t_s, one.duration_s) for one in session.requests] == [(0.0, 9.0), (3.0, 1.0)]


def test_a_parent_that_is_not_in_the_recording_is_not_named() -> None:
    (session,) = sessions_of((0.0, turn("daughter", 1, parent="mother")), (1.0, turn("son", 1, 2, parent="mother")))

    assert [(one.conversation, one.parent, one.kind) for one in session.requests] == [
        ("c0", None, "sub"),
        ("c1", None, "sub"),
    ]


def test_families_that_turn_out_to_be_one_become_one_and_keep_what_they_share() -> None:
    (session,) = sessions_of(
        (0.0, turn("root", 1, 2)),
        (1.0, turn("leaf", 1, 2, 3, parent="middle")),
        (2.0, turn("middle", 1, 2, 4, parent="root")),
    )

    assert [(one.conversation, one.parent) for one in session.requests] == [("c0", None), ("c1", "c2"), ("c2", "c0")]
    assert [one.blocks for one in session.requests] == [((0, 2),), ((0, 3),), ((0, 2), (3, 1))]


def test_two_legs_of_one_caller_are_one_request() -> None:
    (session,) = sessions_of(
        (0.0, turn("a", 1, 2, leg="context", dur=1.0, output_tokens=1, stop=None)),
        (1.5, turn("a", 1, 2, leg="generation", dur=4.0, output_tokens=9)),
        (7.0, turn("a", 1, 2, leg="context", output_tokens=1, stop=None)),
    )

    assert [(one.t_s, one.duration_s, one.output_tokens, one.stop) for one in session.requests] == [
        (0.0, 5.5, 9, "end"),
        (7.0, 1.0, 1, None),
    ]


def test_nobody_is_above_itself() -> None:
    (session,) = sessions_of((0.0, turn("a", 1, parent="b")), (1.0, turn("b", 1, parent="a")))

    assert [one.parent for one in session.requests] == ["c1", None]


def test_the_quietest_family_is_written_early_when_all_take_too_much() -> None:
    written: list[Session] = []
    families = Families(2, written.append, max_bytes=2500)
    for at, name in enumerate(("a", "b", "a", "c")):
        families.add(turn(name, 1), float(at))

    assert [(len(session.requests), families.cut) for session in written] == [(1, 2), (2, 2)]
    families.close()
    assert len(written) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.lists(st.integers(0, 2), max_size=4), st.integers(0, 9)),
        min_size=1,
    ),
    st.sampled_from([1500, 1 << 20]),
)
def test_whatever_edges_tell_a_reader_takes_and_nothing_is_lost(
    told: list[tuple[int, int, list[int], int]], max_bytes: int
) -> None:
    written: list[Session] = []
    families = Families(2, written.append, max_bytes=max_bytes)
    for own, parent, blocks, began in told:
        families.add(turn(f"{own}", *blocks, parent=None if own == parent else f"{parent}"), float(began))
    families.close()

    assert [fault_of(session) for session in written] == [None] * len(written)
    assert sum(len(session.requests) for session in written) == len(told)
    if not families.cut:
        lengths = sorted(len(blocks) for _, _, blocks, _ in told)
        assert sorted(one.num_blocks for session in written for one in session.requests) == lengths


@pytest.mark.parametrize("line", ["", "{}", '{"what": "turn"}', '{"what": "sign", "now": "x"}', "[]", "<html>"])
def test_a_line_of_something_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expected|Object|truncated|malformed"):
        decode(line)
