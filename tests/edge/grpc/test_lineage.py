"""Whatever names a parent in metadata, it is meant: what may not be believed is refused, and nothing is ignored."""

from __future__ import annotations

import grpc
import pytest

from tests.edge.core.agents import AGENTS
from tests.edge.grpc.harness import Client, FrontEnd, request

NO_PAIR = ("host", "authorization", "accept", "content-type", "user-agent")


def sent(agent: str, who: str) -> list[tuple[str, str]]:
    """An agent's headers as metadata."""
    return [(name.lower(), value) for name, value in AGENTS[agent][who] if name.lower() not in NO_PAIR]


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_names_give_its_tree_as_over_http(edge: FrontEnd, client: Client, agent: str) -> None:
    for who in ("root", "child", "grandchild"):
        client.answer(request(), sent(agent, who))

    root, child, grandchild = (order.lineage for order in edge.worker.orders)
    assert [one.parent for one in (root, child, grandchild)] == [None, root.conversation, child.conversation]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_parent_under_any_name_takes_the_scope(edge: FrontEnd, other: Client, agent: str) -> None:
    other.answer(request(), sent(agent, "root"))
    code, details = other.refused(request(), sent(agent, "child"))

    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert "affinity" in details
    assert len(edge.worker.orders) == 1
