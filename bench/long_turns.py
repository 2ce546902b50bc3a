"""Long prompts through a whole edge: what a next turn costs, and what other streams notice of fresh ones.

A real edge in front of a fake worker. A conversation of 43 turns and 600 KB is sent once, then turn after turn; the CPU
of the edge's process is divided by the turns: body, JSON, lineage, template, tokens, hashes, the way to the worker.
Then 16 clients stream while four others send fresh prompts of 600 KB one after the other, against the same 16 alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx

from bench.edge import MODEL, TOKENS
from bench.long_prompt import PROMPT_CHARS, TURNS, conversation, prose
from bench.parts import configured, cpu_s, embedded_model, process
from edge.keyring import Keyring

NEXT_TURNS = 20
STREAMS = 16
REQUESTS = 6
FLOODERS = 4
TIMEOUT_S = 60.0


def run() -> dict[str, Any]:
    model = embedded_model()
    text = prose(4 * PROMPT_CHARS)
    with tempfile.TemporaryDirectory() as folder, process("bench.fake_worker") as (worker, _):
        keyring = Keyring.open(Path(folder) / "keys.json")
        config = {
            "listen": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "model": {"name": MODEL, "path": str(model)},
            "keys_file": str(keyring.path),
            "generation_servers": [worker["grpc"]],
            "log": {"level": "warning"},
        }
        with configured("edge", config, until="ready") as (edge, edge_process):
            caller = Caller(edge["http"], keyring.local_key)
            messages = conversation(text[:PROMPT_CHARS], TURNS)
            before_s = cpu_s(edge_process)
            caller.ask(messages)
            first_ms = 1000 * (cpu_s(edge_process) - before_s)
            before_s = cpu_s(edge_process)
            for turn in range(NEXT_TURNS):
                messages = [
                    *messages,
                    {"role": "assistant", "content": f"Turn {turn}: {text[900 * turn :][:400]}"},
                    {"role": "user", "content": text[700 * turn :][:500]},
                ]
                caller.ask(messages)
            next_ms = 1000 * (cpu_s(edge_process) - before_s) / NEXT_TURNS
            alone = caller.stream()
            beside = caller.stream_beside(lambda number: conversation(text[3 * number :][:PROMPT_CHARS], TURNS))
    return {
        "what": "long turns through the edge",
        "turns": TURNS,
        "prompt_bytes": PROMPT_CHARS,
        "first_turn_cpu_ms": first_ms,
        "next_turn_cpu_ms": next_ms,
        "gap_p99_ms_alone": alone["gap_p99_ms"],
        "gap_p99_ms_beside_fresh_prompts": beside["gap_p99_ms"],
        "fresh_prompts": beside["fresh_prompts"],
    }


class Caller:
    """One key's requests to one edge."""

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._key = key
        self._client = httpx.Client(
            base_url=f"http://{address}", headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
        )

    def ask(self, messages: list[dict[str, Any]]) -> None:
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        self._client.post("/v1/chat/completions", json=body).raise_for_status()

    def stream(self) -> dict[str, Any]:
        """16 clients that stream; the percentiles that they saw."""
        numbers = ["--clients", str(STREAMS), "--requests", str(REQUESTS), "--tokens", str(TOKENS)]
        where = ["--address", self._address, "--key", self._key, "--model", MODEL]
        done = subprocess.run(
            [sys.executable, "-m", "bench.http_load", *numbers, *where], stdout=subprocess.PIPE, text=True, check=True
        )
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    def stream_beside(self, fresh: Any) -> dict[str, Any]:
        """The same while four clients send prompts that `fresh` makes of a number, until the streams end."""
        over = threading.Event()
        sent = [0] * FLOODERS

        def flood(client: int) -> None:
            caller = Caller(self._address, self._key)
            while not over.is_set():
                caller.ask(fresh(1 + client + FLOODERS * sent[client]))
                sent[client] += 1

        threads = [threading.Thread(target=flood, args=(client,)) for client in range(FLOODERS)]
        for thread in threads:
            thread.start()
        try:
            seen = self.stream()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        return seen | {"fresh_prompts": sum(sent)}
