"""GET /kinroute/v1/recording: what those who may record see of live traffic, and what they never see."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.edge.http.harness import KEY, MODEL, OPERATOR_KEY, OTHER_KEY, Script, Served, served

PATH = "/kinroute/v1/recording"
SALT = "aa" * 32
SECRETS = ("tell me a secret", "mother", "daughter", "Hello!", "acme", "ann")


class Recorded:
    """One follower of an edge. `seen`: all that it was told."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.seen = ""

    def line(self) -> dict[str, Any]:
        line = next(self._lines)
        self.seen += line
        told: dict[str, Any] = json.loads(line)
        return told

    def turn(self) -> dict[str, Any]:
        while "conversation" not in (line := self.line()):
            pass
        return line


@contextmanager
def recorded(edge: Served, *, salt: str = SALT, block_tokens: int = 8) -> Iterator[Recorded]:
    url = f"{edge.admin_url}{PATH}"
    asked = {"salt": salt, "block_tokens": str(block_tokens)}
    with httpx.stream("GET", url, params=asked, timeout=20.0) as response:
        assert response.status_code == 200
        recording = Recorded(response)
        assert (hello := recording.line())["lost"] == 0
        assert hello["block_tokens"] == block_tokens
        yield recording


def ask(edge: Served, prompt: str, *, own: str = "", parent: str = "", key: str = KEY) -> None:
    headers = {"X-Kinroute-Conversation-ID": own, "X-Kinroute-Parent-ID": parent}
    with edge.client(key) as client:
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 16}
        given = {name: value for name, value in headers.items() if value}
        assert client.post("/v1/completions", json=asked, headers=given).status_code == 200


def blocks(turn: dict[str, Any]) -> list[bytes]:
    keys = base64.b64decode(turn["blocks"])
    return [keys[at : at + 8] for at in range(0, len(keys), 8)]


def test_a_recording_has_lengths_times_and_lineage_and_no_text_and_no_name(edge: Served) -> None:
    with recorded(edge) as recording:
        ask(edge, "tell me a secret", own="mother")
        ask(edge, "tell me a secret, daughter", own="daughter", parent="mother")
        mother, daughter = recording.turn(), recording.turn()

        assert (mother["kind"], mother["parent"], mother["leg"], mother["stop"]) == ("root", None, None, "stop")
        assert (mother["prompt_tokens"], mother["output_tokens"], mother["final"]) == (16, 6, False)
        assert (daughter["kind"], daughter["parent"]) == ("sub", mother["conversation"])
        assert daughter["family"] == mother["family"] == mother["conversation"] != daughter["conversation"]
        assert 0 <= mother["t"] <= mother["t"] + mother["dur"] <= daughter["t"]
        assert len(blocks(mother)) == 2
        assert blocks(daughter)[:2] == blocks(mother)
        assert not [secret for secret in SECRETS if secret in recording.seen]
        assert not [
            order.lineage.conversation for order in edge.worker.orders if order.lineage.conversation in recording.seen
        ]


def test_under_another_salt_nothing_is_the_same(edge: Served) -> None:
    with recorded(edge) as one, recorded(edge) as same, recorded(edge, salt="bb" * 32) as other:
        ask(edge, "tell me a secret", own="mother")
        first, again, different = one.turn(), same.turn(), other.turn()

    assert (first["conversation"], first["blocks"]) == (again["conversation"], again["blocks"])
    assert first["conversation"] != different["conversation"]
    assert not set(blocks(first)) & set(blocks(different))


def test_tenants_have_nothing_in_common(edge: Served) -> None:
    with recorded(edge) as recording:
        ask(edge, "tell me a secret", own="mother")
        ask(edge, "tell me a secret", own="mother", key=OTHER_KEY)
        one, other = recording.turn(), recording.turn()

    assert one["conversation"] != other["conversation"]
    assert not set(blocks(one)) & set(blocks(other))


def test_an_answer_that_fails_has_no_stop_reason(edge: Served) -> None:
    with recorded(edge) as recording:
        edge.worker.answer = lambda order: Script("Hi", hold=None, step_s=60.0)
        with edge.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, timeout=0.2)

        assert recording.turn()["stop"] is None


def test_nobody_listens_once_the_follower_is_gone(edge: Served) -> None:
    assert not edge.driver.end_listeners
    with recorded(edge):
        assert len(edge.driver.end_listeners) == 1
    edge.settled(lambda: not edge.driver.end_listeners)


def test_a_fifth_recording_is_refused(edge: Served) -> None:
    with recorded(edge), recorded(edge), recorded(edge), recorded(edge):
        refused = edge.admin(f"{PATH}?salt={SALT}")
        assert (refused.status_code, refused.json()["error"][:24]) == (503, "4 recordings are followe")
    edge.settled(lambda: not edge.driver.end_listeners)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("", "salt must be 16 to 64"),
        ("salt=xy", "salt must be 16 to 64"),
        ("salt=aabb", "salt must be 16 to 64"),
        (f"salt={SALT}&block_tokens=0", "block_tokens must be"),
        (f"salt={SALT}&block_tokens=1e9", "block_tokens must be"),
        (f"salt={SALT}&pepper=1", "not 'pepper'"),
    ],
)
def test_what_cannot_be_followed_is_refused(edge: Served, query: str, told: str) -> None:
    refused = edge.admin(f"{PATH}?{query}")

    assert refused.status_code == 400
    assert told in refused.json()["error"]


def test_only_operators_may_record(text_folder: Path) -> None:
    with served(text_folder, admin_guarded=True) as edge:
        for key, status in ((KEY, 403), ("wrong", 401), (OPERATOR_KEY, 400)):
            assert httpx.get(edge.admin_url + PATH, headers={"x-api-key": key}, timeout=20.0).status_code == status
