"""The pages that one context rank holds ready, by session."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.memory.transfer import wire

MAX_PULLS_PER_HEAD = 2
"""A generation worker's, and that of another one, once, where the first failed before its first token."""


@dataclass(slots=True, eq=False)
class Session:
    """`pages`: int32 [n], one for each block. `pulls`: which heads each pulling rank has asked for."""

    secret: bytes
    pages: npt.NDArray[np.int32]
    pulls: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class Sessions:
    """Pins come and go on the engine thread while the transfer thread looks them up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._nobody = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session_id: str, secret: str, pages: npt.NDArray[np.int32]) -> None:
        key = bytes.fromhex(session_id)
        with self._lock:
            assert key not in self._sessions, "a session id came again"
            self._sessions[key] = Session(bytes.fromhex(secret), np.array(pages, np.int32))

    def remove(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(bytes.fromhex(session_id), None)

    def prove(self, request: wire.Request, data: bytes, nonce: bytes, number: int) -> Session | None:
        """The session that `data`, the request's bytes, prove to know the secret of. As slow where there is none."""
        with self._lock:
            session = self._sessions.get(request.session_id)
        secret = self._nobody if session is None else session.secret
        return session if wire.proves(secret, nonce, number, data) else None

    def take(self, session: Session, request: wire.Request) -> bool:
        """Note this pull. False: this rank has pulled already, or others have pulled its heads often enough."""
        with self._lock:
            if request.puller in session.pulls:
                return False
            wanted = range(request.head_start, request.head_stop)
            for head in wanted:
                if sum(start <= head < stop for start, stop in session.pulls.values()) >= MAX_PULLS_PER_HEAD:
                    return False
            session.pulls[request.puller] = (request.head_start, request.head_stop)
            return True

    def stands(self, session_id: bytes, session: Session) -> bool:
        """Whether its pages are still pinned."""
        with self._lock:
            return self._sessions.get(session_id) is session
