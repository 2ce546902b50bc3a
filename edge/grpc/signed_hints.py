"""TensorRT-LLM's signed hints from orchestrators that speak its dialect to this edge."""

from __future__ import annotations

from collections.abc import Mapping

from edge.core.errors import Code, EdgeError
from edge.core.types import Scope
from edge.grpc.asked import Asked
from edge.grpc.door import Caller
from edge.grpc.errors import invalid
from enginelink.trtllm_affinity import CONTEXT_ONLY, ID_KEY, AffinityError, Presented


class SignedHints:
    """Believes what is signed under the key of the caller's own tenant. `keys`: by tenant."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = dict(keys)

    @property
    def is_taken(self) -> bool:
        return bool(self._keys)

    def use(self, tenant: str, key: bytes) -> None:
        """Instead of the key that it had."""
        self._keys[tenant] = key

    def parent_of(self, caller: Caller, asked: Asked, model: str) -> str:
        """The parent that the caller's metadata names, proven; empty where there is no hint. `model`: as the request
        wrote it. Raises EdgeError."""
        try:
            presented = Presented.read(caller.pairs)
            if presented is None:
                return ""
            if not caller.principal.may(Scope.AFFINITY):
                raise EdgeError(
                    Code.FORBIDDEN, f"{ID_KEY}: this key lacks the scope affinity.", reason="no scope affinity"
                )
            if asked.request_type != CONTEXT_ONLY:
                raise invalid(f"{ID_KEY} goes with context_only requests", reason="hint without context leg")
            key = self._keys.get(caller.tenant)
            presented.verify(
                () if key is None else (key,),
                model=model,
                conversation=asked.conversation,
                request_id=asked.request_id,
            )
        except AffinityError as error:
            raise invalid(str(error), reason=error.reason) from error
        return presented.parent
