"""An agent of the demo: asks one model through one edge, and keeps what each answer showed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from kinroute.problem import Problem

REPLY_TOKENS = 24
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request showed. `ttft_ms`: until the first content arrived; `receipt`: the edge's route receipt."""

    text: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    receipt: dict[str, Any]

    @property
    def context_worker(self) -> str:
        return str(self.receipt.get("context_worker", ""))

    @property
    def conversation(self) -> str:
        """As workers know it."""
        return str(self.receipt.get("conversation", ""))


class Agent:
    """Every method raises Problem where the edge cannot be reached, or refuses."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._model = self._first_model()

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
            raise Problem(self._unreachable(error)) from error
        details = usage.get("prompt_tokens_details") or {}
        return Answer(text, ttft_ms, usage.get("prompt_tokens", 0), details.get("cached_tokens", 0), receipt)

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise Problem(self._unreachable(error)) from error
        _require_success(response)
        return str(response.json()["data"][0]["id"])

    def _unreachable(self, error: httpx.HTTPError) -> str:
        url = self._client.base_url
        return f"Nothing answers at {url} ({error}): start Kinroute with scripts/run, or name its address with --url."


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
