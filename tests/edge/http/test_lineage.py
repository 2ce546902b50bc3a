"""Lineage over HTTP: tokens in and out, what is refused, and what is told of what was ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from edge.core.types import ConversationKey, TenantLimits
from tests.edge.core.agents import AGENTS, CLAUDE_CODE
from tests.edge.core.lineages import LINEAGE_KEY, make_lineages
from tests.edge.http.harness import KEY, MODEL, OTHER_KEY, Served, served

HEADER = "X-Kinroute-Lineage"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def strict(text_folder: Path) -> Iterator[Served]:
    """An edge where only tokens prove, and a parent has one child."""
    lineages = make_lineages(proof="token", limits=TenantLimits(children=1))
    with served(text_folder, lineages=lineages) as running:
        yield running


def ask(edge: Served, headers: dict[str, str], *, key: str = KEY, stream: bool = False) -> httpx.Response:
    with edge.client(key) as client:
        return client.post("/v1/chat/completions", json=BODY | {"stream": stream}, headers=headers)


def conversation(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(json.loads(response.headers["x-kinroute-receipt"])["conversation"])


def counted(edge: Served, metric: str) -> list[str]:
    return [line for line in edge.admin("/metrics").text.splitlines() if line.startswith(metric + "{")]


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_carries_its_conversations_own_token(edge: Served, *, stream: bool) -> None:
    answer = ask(edge, {"X-Kinroute-Conversation-ID": "root"}, stream=stream)

    claims = jwt.decode(answer.headers[HEADER], LINEAGE_KEY.secret, ["HS256"])
    assert (claims["tenant"], claims["conversation"], claims["depth"]) == ("acme", conversation(answer), 0)
    assert claims["exp"] - claims["iat"] == 86_400
    assert HEADER not in ask(edge, {}, stream=stream).headers, "nobody named it"
    assert HEADER not in ask(edge, {"X-Kinroute-Parent-ID": "a" * 257}, stream=stream).headers, "nothing was answered"


def test_what_shows_a_token_is_that_conversations_child_and_hands_on_its_own(edge: Served) -> None:
    root = ask(edge, {"X-Kinroute-Conversation-ID": "root"})
    child = ask(edge, {"X-Kinroute-Conversation-ID": "child", HEADER: root.headers[HEADER]})
    grandchild = ask(edge, {"x_kinroute_lineage": child.headers[HEADER]})

    placed = [order.lineage for order in edge.worker.orders]
    assert [one.parent for one in placed] == [None, conversation(root), conversation(child)]
    assert {one.family for one in placed} == {conversation(root)}
    assert [one.depth for one in placed] == [0, 1, 2]
    assert placed[2].conversation == conversation(grandchild)


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_own_headers_give_its_family_tree(edge: Served, agent: str) -> None:
    with edge.client() as client:
        for sent in AGENTS[agent].values():
            own = [(name, value) for name, value in sent if name.lower() not in ("host", "authorization")]
            answer = client.post("/v1/chat/completions", json=BODY, headers=[*client.headers.items(), *own])
            assert answer.status_code == 200, answer.text

    root, child, grandchild = (order.lineage for order in edge.worker.orders)
    assert [one.parent for one in (root, child, grandchild)] == [None, root.conversation, child.conversation]
    assert len({root.conversation, child.conversation, grandchild.conversation}) == 3
    assert child.family == root.family


def test_a_token_is_worth_nothing_to_another_tenant(edge: Served) -> None:
    token = ask(edge, {"X-Kinroute-Conversation-ID": "root"}).headers[HEADER]
    edge.worker.orders.clear()

    refused = ask(edge, {"X-Kinroute-Conversation-ID": "child", HEADER: token}, key=OTHER_KEY)

    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "x-kinroute-lineage")
    assert not edge.worker.orders


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({HEADER: "eyJhbGciOiJub25lIn0.e30."}, "x-kinroute-lineage"),
        ({HEADER: "a" * 2_049}, "x-kinroute-lineage"),
        ({"X-Kinroute-Conversation-Final": "true"}, "x-kinroute-conversation-final"),
        ({"X-Kinroute-Parent-ID": "a" * 257}, "x-kinroute-parent-id"),
    ],
)
def test_a_hint_that_is_wrong_is_refused_by_name(edge: Served, headers: dict[str, str], param: str) -> None:
    refused = ask(edge, headers)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_what_is_refused_is_counted_by_reason(edge: Served) -> None:
    token = ask(edge, {"X-Kinroute-Conversation-ID": "root"}).headers[HEADER]
    start, _, _ = token.rpartition(".")

    ask(edge, {HEADER: f"{start}.{'A' * 43}"})
    ask(edge, {"X-Kinroute-Parent-ID": "p"}, key=OTHER_KEY)

    lines = counted(edge, "kinroute_edge_refused_total")
    assert any('reason="not signed with the key it names",what="token"' in line for line in lines)
    assert any('reason="no scope affinity",what="hint"' in line for line in lines)
    assert token not in edge.admin("/kinroute/v1/requests").text


def test_an_agents_hint_that_may_not_be_believed_is_ignored_told_and_counted(edge: Served) -> None:
    headers = {name: value for name, value in CLAUDE_CODE["child"] if name.startswith("X-Claude")}

    answer = ask(edge, headers, key=OTHER_KEY)

    assert json.loads(answer.headers["x-kinroute-receipt"])["ignored_lineage"] == "claude-code: no scope affinity"
    [newest, *_] = edge.admin("/kinroute/v1/requests").json()["requests"]
    assert newest["ignored_lineage"] == "claude-code: no scope affinity"
    [line] = counted(edge, "kinroute_edge_ignored_hints_total")
    assert 'family="claude-code",reason="no scope affinity"' in line
    assert edge.worker.orders[-1].lineage.parent is None
    assert "ignored_lineage" not in ask(edge, headers).headers["x-kinroute-receipt"]


def test_where_only_tokens_prove_a_name_is_not_enough(strict: Served) -> None:
    parent = ask(strict, {"X-Kinroute-Conversation-ID": "p"})
    named = ask(strict, {"X-Kinroute-Conversation-ID": "c", "X-Kinroute-Parent-ID": "p"})
    shown = ask(strict, {"X-Kinroute-Conversation-ID": "c", HEADER: parent.headers[HEADER]})

    assert (named.status_code, named.json()["error"]["param"]) == (400, "x-kinroute-parent-id")
    assert conversation(shown)
    assert strict.worker.orders[-1].lineage.parent == ConversationKey(conversation(parent))


def test_a_parent_with_too_many_children_gets_no_more_and_is_told_when_to_come_again(strict: Served) -> None:
    token = ask(strict, {"X-Kinroute-Conversation-ID": "p"}).headers[HEADER]
    assert ask(strict, {"X-Kinroute-Conversation-ID": "c1", HEADER: token}).status_code == 200

    refused = ask(strict, {"X-Kinroute-Conversation-ID": "c2", HEADER: token})

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "600"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert ask(strict, {"X-Kinroute-Conversation-ID": "c1", HEADER: token}).status_code == 200


@pytest.mark.parametrize(
    "name", ["x-trtllm-subagent-affinity-id", "OpenEngine_Priority", "Kinroute-Lineage", "X-Kinroute_Internal-Parent"]
)
def test_internal_headers_are_dropped_before_anything_reads_them(edge: Served, name: str) -> None:
    assert ask(edge, {"X-Kinroute-Conversation-ID": "c", name: "a" * 3_000}).status_code == 200

    assert edge.worker.orders[-1].lineage.parent is None


def test_a_callers_own_salt_is_mixed_into_its_tenants_and_never_used_alone(edge: Served) -> None:
    for key, salt in ((KEY, None), (KEY, "mine"), (KEY, "mine"), (OTHER_KEY, "mine")):
        with edge.client(key) as client:
            assert client.post("/v1/chat/completions", json=BODY | {"cache_salt": salt}).status_code == 200

    plain, own, again, theirs = (order.cache_salt for order in edge.worker.orders)
    assert own == again
    assert len({plain, own, theirs, "mine"}) == 4
