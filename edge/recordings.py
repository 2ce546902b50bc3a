"""What a recording of live traffic is told: who goes on with whom, when, and how long. Never a text, a token or a name.

Each follower has a queue of its own. Conversations and blocks are told under keyed hashes that hold for one salt: under
another none is the same, and without the edges' `id_key` nobody can compute them from an id or a prompt. Edges that
share it tell a conversation alike, so one recording can follow several.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import orjson

from edge.core.life_events import Phase
from edge.core.prompt_keys import Prompt, PromptKeys
from edge.core.types import Turn
from edge.ended import EndedTurn, EndListener

MAX_RECORDINGS = 4
MAX_WAITING = 4096
MAX_WAITING_BYTES = 64 << 20
"""Of prompts that wait to be told."""
MAX_KEYS_BYTES = 32 << 20
ID_BYTES = 12
SIGN_OF_LIFE_S = 2.0
TURN_BYTES = 1024
"""What a turn takes beside its prompt, about."""


class Recordings:
    """Those that are followed now; `listeners` hear of turns only while there are any."""

    def __init__(self, listeners: list[EndListener], id_key: bytes) -> None:
        self._listeners = listeners
        self._id_key = id_key
        self._now: list[Recording] = []

    def begin(self, salt: bytes, block_tokens: int) -> Recording | None:
        """None: there are as many as there may be."""
        if len(self._now) >= MAX_RECORDINGS:
            return None
        recording = Recording(hmac.digest(self._id_key, b"recording" + salt, "sha256"), block_tokens)
        self._now.append(recording)
        self._listeners.append(recording)
        return recording

    def end(self, recording: Recording) -> None:
        self._now.remove(recording)
        self._listeners.remove(recording)

    def stop(self) -> None:
        """The edge stops: every follower is told what waits, and then the end."""
        for recording in self._now:
            recording.stop()


class Recording:
    """One follower's, from when it is made. A follower that is slow loses turns, and is told how many."""

    def __init__(
        self,
        key: bytes,
        block_tokens: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._key = key
        self._block_tokens = block_tokens
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._began_s = asyncio.get_running_loop().time()
        self._waiting: deque[EndedTurn] = deque()
        self._waiting_bytes = 0
        self._lost = 0
        self._news = asyncio.Event()
        self._is_over = False
        self._keys = PromptKeys(MAX_KEYS_BYTES)

    def ended(self, ended: EndedTurn) -> None:
        size = _size(ended)
        if len(self._waiting) >= self._max_waiting or self._waiting_bytes + size > self._max_waiting_bytes:
            self._lost += 1
            return
        self._waiting.append(ended)
        self._waiting_bytes += size
        self._news.set()

    def stop(self) -> None:
        self._is_over = True
        self._news.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """JSON lines: a turn each as it ends, and signs of life, which say how many were lost. Ends after `stop`."""
        yield self._sign(block_tokens=self._block_tokens)
        while True:
            while self._waiting:
                ended = self._waiting.popleft()
                self._waiting_bytes -= _size(ended)
                yield orjson.dumps(self._told(ended)) + b"\n"
            if self._is_over:
                yield self._sign(over=True)
                return
            self._news.clear()
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await self._news.wait()
            except TimeoutError:
                yield self._sign()

    def _sign(self, **more: Any) -> bytes:
        return (
            orjson.dumps(
                {"what": "sign", "now": self._since_s(asyncio.get_running_loop().time()), "lost": self._lost, **more}
            )
            + b"\n"
        )

    def _told(self, ended: EndedTurn) -> dict[str, Any]:
        turn, lineage = ended.turn, ended.turn.lineage
        return {
            "what": "turn",
            "t": self._since_s(ended.began_s),
            "dur": round(ended.ended_s - ended.began_s, 3),
            "conversation": self._id(turn, lineage.conversation),
            "parent": None if lineage.parent is None else self._id(turn, lineage.parent),
            "family": self._id(turn, lineage.family),
            "kind": "side" if lineage.side else "root" if lineage.parent is None else "sub",
            "leg": None if ended.phase is Phase.AGGREGATED else ended.phase.value,
            "stop": ended.reason,
            "final": lineage.final and ended.reason is not None,
            "prompt_tokens": turn.prompt_tokens,
            "output_tokens": ended.output_tokens,
            "blocks": base64.b64encode(self._prints(turn)).decode(),
        }

    def _since_s(self, time_s: float) -> float:
        return round(time_s - self._began_s, 3)

    def _id(self, turn: Turn, name: str) -> str:
        tenant = turn.principal.tenant.encode(errors="surrogatepass")
        owner = len(tenant).to_bytes(4, "little") + tenant
        return hashlib.blake2b(owner + name.encode(), key=self._key, digest_size=ID_BYTES).hexdigest()

    def _prints(self, turn: Turn) -> bytes:
        """8 bytes of the key of each whole block. The rest of a key goes into the next one and is told to nobody, so a
        guess of what a block holds cannot be tried."""
        scope = hashlib.blake2b(turn.cache_salt, key=self._key, digest_size=32).digest()
        return (
            self._keys.prints(turn.lineage, Prompt(turn.token_ids, scope), self._block_tokens).astype("<u8").tobytes()
        )


def _size(ended: EndedTurn) -> int:
    return len(ended.turn.token_ids) + TURN_BYTES
