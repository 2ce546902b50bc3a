"""Two edges with one key file, which never talk to each other, agree on who is who and on where it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.edge.test_app import Edge, edge_of, heard, running


@dataclass(frozen=True)
class Asking:
    """One edge, asked over one connection."""

    edge: Edge
    client: httpx.Client

    def __call__(self, prompt: str = "Hi", **ids: str) -> tuple[dict[str, Any], str]:
        """The receipt of an answer, its family with it, and the lineage token that came with the answer."""
        headers = {f"x-kinroute-{role.replace('_', '-')}": value for role, value in ids.items()}
        response = self.client.post(
            f"{self.edge.url}/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": 2},
            headers={"authorization": f"Bearer {self.edge.key}", **headers},
        )
        assert response.status_code == 200, response.text
        [newest, *_] = self.client.get(f"{self.edge.admin}/kinroute/v1/requests").json()["requests"]
        receipt = json.loads(response.headers["x-kinroute-receipt"])
        return receipt | {"family": newest["receipts"][0]["family"]}, response.headers.get("x-kinroute-lineage", "")


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Asking, Asking]]:
    """In front of the same three workers."""
    folder: Path = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        processes = [stack.enter_context(running("bench.fake_worker", "--step-ms", "1")) for _ in range(3)]
        workers = [heard(process)["grpc"] for process in processes]
        client = stack.enter_context(httpx.Client())
        one, other = (Asking(stack.enter_context(edge_of(folder, workers, workers)), client) for _ in range(2))
        for asking in (one, other):
            assert heard(asking.edge.process) == {"event": "ready"}
        yield one, other


def test_a_family_is_one_family_in_one_place_whichever_edge_its_members_reach(edges: tuple[Asking, Asking]) -> None:
    one, other = edges
    used = set()
    for n in range(12):
        root, token = one(conversation_id=f"root-{n}")
        by_name, _ = other(conversation_id=f"child-{n}", parent_id=f"root-{n}")
        by_token, child_token = other(conversation_id=f"child-{n}", lineage=token)
        third, _ = one(conversation_id=f"third-{n}", lineage=child_token)
        again, _ = other(conversation_id=f"root-{n}")

        assert by_token["conversation"] == by_name["conversation"]
        assert again["conversation"] == root["conversation"]
        members = (root, by_name, by_token, third, again)
        assert {(member["family"], member["context_worker"]) for member in members} == {
            (root["conversation"], root["context_worker"])
        }
        used.add(root["context_worker"])
    assert len(used) > 1, "families are spread"


def test_a_conversation_that_nobody_named_has_one_id_on_both(edges: tuple[Asking, Asking]) -> None:
    (first, no_token), (second, _) = (ask("once upon a time") for ask in edges)

    assert first["conversation"] == second["conversation"]
    assert first["context_worker"] == second["context_worker"]
    assert no_token == ""
