"""Which header says what, and which is believed to have said nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.errors import Code, EdgeError
from edge.core.headers import Claim, HeaderFamilies, HeaderNames, fold
from tests.edge.core.agents import AGENTS, CLAUDE_CODE, CLAUDE_SESSION, CODEX, COMMON, Headers

FAMILIES = HeaderFamilies()


def read(*raw: tuple[str, str], body: str | None = None, cache_key: str | None = None) -> Claim:
    return FAMILIES.read(fold(raw), body_conversation=body, cache_key=cache_key)


def refused(*raw: tuple[str, str], body: str | None = None, cache_key: str | None = None) -> str | None:
    with pytest.raises(EdgeError) as caught:
        read(*raw, body=body, cache_key=cache_key)
    assert caught.value.code is Code.INVALID
    return caught.value.param


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_child_names_what_its_parent_calls_itself(agent: str) -> None:
    sent = AGENTS[agent]
    root, child, grandchild = (read(*sent[who]) for who in ("root", "child", "grandchild"))

    assert {claim.family for claim in (root, child, grandchild)} == {agent}
    assert root.parent is None
    assert child.parent == root.conversation
    assert grandchild.parent == child.conversation
    assert len({root.conversation, child.conversation, grandchild.conversation}) == 3
    assert not root.explicit


def test_claude_codes_agents_carry_their_root() -> None:
    assert [read(*sent).root for sent in CLAUDE_CODE.values()] == [CLAUDE_SESSION] * 3


def test_a_session_id_cannot_pass_for_a_session_and_an_agent() -> None:
    session, agent = "x-claude-code-session-id", "x-claude-code-agent-id"

    assert read((session, "a"), (agent, "b")).conversation not in (
        read((session, f"a{joint}b")).conversation for joint in ("/", ":", "-", "")
    )


@pytest.mark.parametrize("task", ["compact", "memory_consolidation", "review"])
def test_a_side_task_of_codex_is_beside_its_parent_and_not_its_child(task: str) -> None:
    claim = read(*CODEX["child"][:-1], ("X-OpenAI-Subagent", task))

    assert (claim.parent, claim.placement, claim.side) == (None, "t-1", True)


def test_codex_without_a_thread_is_known_by_its_session() -> None:
    assert read(("session-id", "s-1")).conversation == "s-1"


def test_only_our_own_headers_are_explicit() -> None:
    claim = read(
        ("X-Kinroute-Conversation-ID", "c"), ("X-Kinroute-Parent-ID", "p"), ("X-Kinroute-Conversation-Final", "TRUE")
    )

    assert claim == Claim("kinroute", "c", "p", final=True, explicit=True)


def test_the_first_family_that_is_present_wins_and_later_ones_are_not_read() -> None:
    order = [
        ("kinroute", ("x-kinroute-parent-id", "p")),
        ("dynamo", ("x-dynamo-session-id", "d")),
        ("claude-code", ("x-claude-code-session-id", "c")),
        ("codex", ("thread-id", "t")),
        ("opencode", ("x-opencode-session", "o")),
        ("other", ("x-litellm-session-id", "l")),
    ]
    for at, (family, _) in enumerate(order):
        assert read(*(header for _, header in reversed(order[at:]))).family == family

    assert read(("x-dynamo-session-id", "d"), ("x-opencode-session", "\x01"), cache_key="\x01").family == "dynamo"


def test_a_child_that_only_names_its_parent_is_of_its_parents_family() -> None:
    for family, name in (
        ("kinroute", "x-kinroute-parent-id"),
        ("dynamo", "x-dynamo-parent-session-id"),
        ("codex", "x-codex-parent-thread-id"),
        ("opencode", "x-parent-session-id"),
    ):
        assert read((name, "p")) == Claim(family, parent="p", explicit=family == "kinroute")


def test_a_header_of_ours_alone_is_enough_to_be_explicit() -> None:
    assert read(("X-Kinroute-Conversation-ID", "c")) == Claim("kinroute", "c", explicit=True)
    assert read(("X-Kinroute-Conversation-Final", "true")) == Claim("kinroute", final=True, explicit=True)


def test_a_session_id_that_many_agents_send_is_of_no_family_by_itself() -> None:
    assert read(("x-session-id", "s")) == Claim("other", "s")
    assert read(("x-session-id", "s"), ("x-session-affinity", "s")).family == "opencode"


def test_an_agent_without_its_session_is_nobody() -> None:
    assert read(("x-claude-code-agent-id", "a"), ("x-claude-code-parent-agent-id", "b")) == Claim()


def test_a_body_wins_over_the_headers_of_its_row_only() -> None:
    assert read(("x-litellm-session-id", "header"), body="body").conversation == "body"
    assert read(("x-litellm-session-id", "header"), body="  ").conversation == "header"
    assert read(("thread-id", "codex"), body="body").conversation == "codex"


def test_a_prompt_cache_key_serves_placement_where_there_is_no_id() -> None:
    assert read(cache_key="k") == Claim(placement="k")
    assert read(body="c", cache_key="k").placement is None


def test_the_configured_header_names_a_parent_in_any_spelling() -> None:
    families = HeaderFamilies(HeaderNames(others_parent="my-parent"))

    for name in ("My_Parent", "my-parent", "MY-PARENT"):
        assert families.read(fold([(name, "p")])) == Claim("other", parent="p")
    assert read(("my-parent", "p")) == Claim()


def test_a_correlation_id_says_nothing_unless_it_is_configured() -> None:
    families = HeaderFamilies(HeaderNames(others=("x-correlation-id",)))

    assert read(("x-correlation-id", "c")) == Claim()
    assert families.read(fold([("X-Correlation-ID", "c")])) == Claim("other", "c")


def test_every_name_can_be_changed_and_the_old_one_says_nothing_then() -> None:
    old = HeaderNames(others=("x-session-id",), others_parent="x-others-parent")
    new = HeaderNames(
        **{name: f"new-{name}".replace("_", "-") for name in old.__slots__ if name != "others"}, others=("new-others",)
    )
    said = [
        {"conversation": "c", "parent": "p", "final": "true"},
        {"lineage": "t"},
        {"dynamo_session": "d", "dynamo_parent": "p", "dynamo_final": "true"},
        {"claude_code_session": "s", "claude_code_agent": "a", "claude_code_parent_agent": "b"},
        {"codex_thread": "t", "codex_parent": "p", "codex_kind": "review"},
        {"codex_session": "s"},
        {"opencode_session": "o", "opencode_parent": "p"},
        {"opencode_id": "o", "opencode_affinity": "o"},
        {"others": "o", "others_parent": "p"},
    ]
    assert {role for roles in said for role in roles} == set(old.__slots__)

    for roles in said:
        before, after = (
            {
                name[0] if isinstance(name := getattr(names, role), tuple) else name: value
                for role, value in roles.items()
            }
            for names in (old, new)
        )
        assert HeaderFamilies(new).read(after) == HeaderFamilies(old).read(before) != Claim()
        assert HeaderFamilies(new).read(before) == Claim()


def test_a_name_that_is_switched_off_is_never_read() -> None:
    families = HeaderFamilies(HeaderNames(codex_session="", lineage=""))

    assert families.read(fold([("session-id", "s"), ("x-kinroute-lineage", "t"), ("", "v")])) == Claim()


def test_a_token_says_nothing_of_who_sends_it() -> None:
    token = ("X-Kinroute-Lineage", "t")

    assert read(token) == Claim(token="t")
    assert read(token, ("thread-id", "c")) == Claim("codex", "c", token="t")
    assert read(token, body="b", cache_key="k") == Claim("other", "b", token="t")
    assert read(token, ("x-kinroute-parent-id", "p")) == Claim("kinroute", None, "p", explicit=True, token="t")


def test_every_refusal_has_a_reason_of_our_own() -> None:
    """For counters: nothing that a caller wrote."""
    wrong: list[tuple[tuple[str, str], ...]] = [
        (("thread-id", "a"), ("thread-id", "b")),
        (("x-opencode-session", "a"), ("x-session-affinity", "b")),
        (("x-kinroute-conversation-final", "yes"),),
        (("thread-id", "a" * 257),),
        (("thread-id", "a\x01"),),
    ]
    reasons = []
    for raw in wrong:
        with pytest.raises(EdgeError) as caught:
            read(*raw)
        reasons.append(caught.value.reason)

    assert reasons == ["two values", "two conversations", "not a flag", "too long", "control characters"]


@pytest.mark.parametrize(
    "raw",
    [
        [("thread-id", "a"), ("Thread_Id", "b")],
        [("X-Kinroute-Parent-ID", "a"), ("x-kinroute-parent-id", "b")],
        [("x-opencode-session", "a"), ("x-session-affinity", "b")],
        [("x-litellm-session-id", "a"), ("x-session-id", "b")],
        [("X-Kinroute-Conversation-Final", "true"), ("x-kinroute-conversation-final", "false")],
        [("X-Kinroute-Conversation-Final", "yes")],
        [("x-session-affinity", "a" * 257)],
        [("x-session-affinity", "é".encode().decode("latin-1") * 129)],
        [("x-session-affinity", "a\x1fb")],
        [("x-session-affinity", "\x1fa")],
        [("x-kinroute-lineage", "a" * 2_049)],
        [("x-kinroute-lineage", "a"), ("X_Kinroute_Lineage", "b")],
        [("x-kinroute-lineage", "a\x7f")],
    ],
)
def test_what_contradicts_itself_is_too_long_or_unprintable_is_refused_by_name(raw: Headers) -> None:
    assert refused(*raw) == raw[0][0].lower().replace("_", "-")


def test_what_is_refused_says_why() -> None:
    for raw, why in (
        (
            [("thread-id", "a"), ("Thread_Id", "b"), ("thread-id", "c")],
            "thread-id is given twice with different values.",
        ),
        ([("thread-id", "a" * 257)], "thread-id is longer than 256 bytes."),
        ([("thread-id", "a\x7fb")], "thread-id has control characters."),
        ([("x-opencode-session", "a"), ("x-session-id", "b")], "name different conversations"),
    ):
        with pytest.raises(EdgeError, match=why):
            read(*raw)


def test_an_id_of_256_bytes_is_not_too_long() -> None:
    assert read(("thread-id", "a" * 256)).conversation == "a" * 256
    assert read(("thread-id", "é".encode().decode("latin-1") * 128)).conversation == "é" * 128


def test_an_id_that_is_no_utf_8_stays_as_it_came() -> None:
    assert read(("thread-id", "kind-\xe9")).conversation == "kind-é"


def test_a_body_is_bounded_as_headers_are() -> None:
    assert refused(body="a" * 257) == "conversation_params.conversation_id"
    assert refused(body="a\n") == "conversation_params.conversation_id"
    assert refused(body="\ud800" * 86) == "conversation_params.conversation_id"
    assert refused(cache_key="k\0") == "prompt_cache_key"


def test_the_same_value_twice_is_one_value() -> None:
    assert read(("thread-id", "a"), ("Thread_Id", " a ")).conversation == "a"
    assert read(("x-opencode-session", "a"), ("x-session-id", "a")).conversation == "a"


def test_a_header_that_nobody_reads_may_be_repeated() -> None:
    assert read(*COMMON) == Claim()


def test_a_blank_header_is_absent() -> None:
    assert read(("x-kinroute-parent-id", " "), ("thread-id", "t")).family == "codex"
    assert read(("thread-id", ""), ("thread-id", "t"), ("Thread_Id", "\t")).conversation == "t"


def test_an_id_is_the_same_in_a_header_and_in_a_body() -> None:
    assert read(("x-litellm-session-id", "kind-é".encode().decode("latin-1"))) == read(body="kind-é")


@pytest.mark.parametrize(
    "name",
    [
        "x-trtllm-subagent-affinity-id",
        "X-TRTLLM-Subagent-Affinity-Auth",
        "x_trtllm_subagent_affinity_id",
        "openengine-priority",
        "OpenEngine_Tenant",
        "kinroute-lineage",
        "Kinroute_Lineage",
        "X-Kinroute_Internal-Worker",
    ],
)
def test_internal_headers_from_outside_are_dropped_in_every_spelling(name: str) -> None:
    assert fold([(name, "forged"), (name, "twice")]) == {}


@given(
    st.lists(st.tuples(st.sampled_from([name for name, _ in COMMON] + ["x-session-id"]), st.text("aB \t", max_size=3)))
)
def test_folding_again_changes_nothing(raw: Headers) -> None:
    once = fold(raw)

    assert fold(once.items()) == once


names = st.sampled_from(
    [
        "x-kinroute-conversation-id",
        "X_Kinroute_Parent_ID",
        "x-claude-code-session-id",
        "x-claude-code-agent-id",
        "thread-id",
        "x-openai-subagent",
        "x-session-id",
        "x-parent-session-id",
        "x-dynamo-session-final",
        "X-Kinroute-Lineage",
    ]
)
values = st.text(st.characters(max_codepoint=255), max_size=8) | st.sampled_from(["true", "review", "a" * 300])


@given(st.lists(st.tuples(names, values), max_size=6), st.none() | st.text(max_size=4), st.none() | st.text(max_size=4))
def test_whatever_is_sent_is_read_or_refused(raw: Headers, body: str | None, cache_key: str | None) -> None:
    try:
        claim = read(*raw, body=body, cache_key=cache_key)
    except EdgeError as error:
        code = error.code
    else:
        code = Code.INVALID
        assert claim.conversation != ""
        assert claim.parent != ""
    assert code is Code.INVALID
