"""`kinroute demo`: a parent spawns two sub-agents, which finish, and returns; shows who served each, and cache hits."""

from __future__ import annotations

import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from kinroute import paths
from kinroute.problem import Problem
from kinroute.up import NOTE

REPLY_TOKENS = 24
TIMEOUT_S = 120.0
Message = dict[str, str]

PROJECT = (
    "You are a careful software agent. The project is a small web shop: a catalogue, a basket, a checkout, and a page "
    "for the people who pack the parcels. Its code is in Python, its pages are plain HTML, its data is in one SQLite "
    "file. Answer in one short sentence. Say only what you know, and say plainly where you are not sure."
)
HELPER = PROJECT + " You were started by another agent for one question: answer it, then stop."


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request showed. `ttft_ms`: until the first content arrived; `receipt`: the edge's route receipt."""

    text: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    receipt: dict[str, Any]


def demo(*, url: str | None, key: str | None) -> int:
    """Play the family against the edge at `url`. Raises Problem where it cannot be reached or refuses."""
    base = url or _running_url()
    family = secrets.token_hex(4)
    headers = {"Authorization": f"Bearer {key or _local_key()}"}
    console = Console()
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S) as client:
        agent = Agent(client, _model(client))
        table = Table("request", "context worker", "generation worker", "TTFT ms", "prompt", "cached")

        def show(request: str, answer: Answer) -> None:
            table.add_row(
                request,
                str(answer.receipt.get("context_worker", "")),
                str(answer.receipt.get("generation_worker", "")),
                f"{answer.ttft_ms:.0f}",
                str(answer.prompt_tokens),
                str(answer.cached_tokens),
            )

        with console.status("The family is at work ..."):
            parent = f"demo-{family}"
            turn = [_message("system", PROJECT), _message("user", "Plan how to speed up the checkout.")]
            first = agent.ask(turn, parent)
            show("parent, turn 1", first)
            questions = ("What could make the basket slow?", "What could make the parcel page slow?")
            children = [f"{parent}-child-{number}" for number in (1, 2)]
            prompts = [[_message("system", HELPER), _message("user", question)] for question in questions]
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(agent.ask, prompts, children, [parent, parent]))
            for number, answer in enumerate(answers, 1):
                show(f"sub-agent {number}", answer)
            report = "\n".join(answer.text for answer in answers)
            turn += [_message("assistant", first.text), _message("user", f"They found:\n{report}\nWhat is next?")]
            show("parent, turn 2", agent.ask(turn, parent))
            prompts[0] += [_message("assistant", answers[0].text), _message("user", "Are you sure?")]
            show("sub-agent 1, again", agent.ask(prompts[0], children[0], parent))
    console.print(table)
    return 0


class Agent:
    """Asks one model through one edge."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model

    def ask(self, messages: list[Message], conversation: str, parent: str | None = None) -> Answer:
        headers = {"X-Kinroute-Conversation-ID": conversation}
        if parent is not None:
            headers["X-Kinroute-Parent-ID"] = parent
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": REPLY_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.monotonic()
        text, ttft_ms = "", 0.0
        usage: dict[str, Any] = {}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                _require_success(response)
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise Problem(f"The edge ended the answer: {chunk['error']['message']}")
                    for choice in chunk["choices"]:
                        piece = choice["delta"].get("content") or ""
                        if piece and not text:
                            ttft_ms = (time.monotonic() - began_s) * 1000
                        text += piece
                    usage = chunk.get("usage") or usage
                receipt = json.loads(response.headers.get("X-Kinroute-Receipt", "{}"))
        except httpx.HTTPError as error:
            raise Problem(_unreachable(str(self._client.base_url), error)) from error
        details = usage.get("prompt_tokens_details") or {}
        return Answer(text, ttft_ms, usage.get("prompt_tokens", 0), details.get("cached_tokens", 0), receipt)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
        _require_success(response)
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise Problem(_unreachable(str(client.base_url), error)) from error


def _require_success(response: httpx.Response) -> None:
    if response.status_code == 401:
        raise Problem("The edge does not know this API key: give the one that `kinroute up` printed with --key.")
    if response.status_code != 200:
        response.read()
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:200]
        raise Problem(f"The edge answered {response.status_code}: {message}")


def _unreachable(url: str, error: httpx.HTTPError) -> str:
    return f"Nothing answers at {url} ({error}): start Kinroute with scripts/run, or name its address with --url."


def _running_url() -> str:
    try:
        return str(json.loads((paths.state_folder() / NOTE).read_text())["url"])
    except (OSError, ValueError, KeyError):
        raise Problem(
            "Kinroute does not run here: start it with scripts/run, or name its address with --url."
        ) from None


def _local_key() -> str:
    from edge.keyring import Keyring, KeyringError

    try:
        return Keyring.load(paths.config_folder() / "keys.json").local_key
    except KeyringError as error:
        raise Problem(f"{error} Or give a key with --key.") from error
