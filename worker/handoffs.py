"""The session references that this worker hands out for its context legs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openengine.v1 import kv_pb2
from worker.core.handoff import PROTOCOL, KvShape, KvSource, SessionRef
from worker.core.outputs import HandoffReady
from worker.core.types import RequestKey
from worker.session_keys import SessionKeys


class Handoffs:
    """Makes a reference when a context leg is ready; `key_of` finds the request of a session while it is held."""

    def __init__(
        self,
        sessions: SessionKeys,
        *,
        shape: KvShape,
        sources: Sequence[KvSource],
        host_key: str,
        instance_id: str,
    ) -> None:
        self._sessions = sessions
        self._shape = shape
        self._sources = tuple(sources)
        self._host_key = host_key
        self._instance_id = instance_id
        self._keys: dict[str, RequestKey] = {}

    @property
    def endpoints(self) -> list[kv_pb2.KvEndpoint]:
        return [kv_pb2.KvEndpoint(host=source.host, port=source.port, protocol=PROTOCOL) for source in self._sources]

    def begin(self, ready: HandoffReady, proven: Callable[[SessionRef], SessionRef]) -> bytes:
        """The serialized KvSessionRef of a context leg whose pages are pinned on every rank. `proven` adds a proof."""
        session_id = self._sessions.session_id(ready.key)
        self._keys[session_id] = ready.key
        ref = SessionRef(
            session_id=session_id,
            secret=self._sessions.secret(ready.key),
            instance_id=self._instance_id,
            host_key=self._host_key,
            request_id=int(ready.key),
            first_token=ready.first_token,
            prompt_tokens=ready.prompt_tokens,
            cached_prompt_tokens=min(ready.cached_tokens, ready.prompt_tokens),
            shape=self._shape,
            sources=self._sources,
        )
        return proven(ref).encode()

    def end(self, key: RequestKey) -> None:
        """Its pin is over."""
        self._keys.pop(self._sessions.session_id(key), None)

    def key_of(self, session_id: str) -> RequestKey | None:
        return self._keys.get(session_id)
