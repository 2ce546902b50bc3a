"""What gRPC metadata says of a request, by OpenEngine's rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from enginelink.openengine_metadata import MetadataError, read_metadata
from enginelink.trtllm_affinity import ID_KEY, AffinityError, Presented
from worker.refusal import invalid, unproven

CONTROL = "/openengine.v1.Control/"
LINEAGE = "kinroute-lineage"


@dataclass(frozen=True, slots=True)
class Metadata:
    """`lineage`: an envelope. `affinity`: a hint in TensorRT-LLM's dialect. At most one of them."""

    target_dp_rank: int | None = None
    lineage: str = ""
    affinity: Presented | None = None

    @classmethod
    def read(cls, pairs: Iterable[tuple[str, str | bytes]]) -> Metadata:
        """Raises Refused where an `openengine-` key or a hint is repeated or malformed."""
        pairs = list(pairs)
        try:
            read = read_metadata(pairs)
            affinity = Presented.read(pairs)
        except MetadataError as error:
            raise invalid(str(error)) from error
        except AffinityError as error:
            raise unproven(str(error)) from error
        lineage = envelope_in(pairs)
        if lineage and affinity is not None:
            raise unproven(f"{LINEAGE} and {ID_KEY}: a request has its lineage from one of them")
        return cls(read.target_dp_rank, lineage, affinity)


def envelope_in(pairs: Iterable[tuple[str, str | bytes]]) -> str:
    """Empty where there is none. Raises Refused where there are two."""
    found = [value for key, value in pairs if key == LINEAGE]
    if len(found) > 1:
        raise unproven(f"{LINEAGE} is given twice")
    return "".join(value if isinstance(value, str) else value.decode(errors="replace") for value in found)


class ControlMetadata(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Holds `Control` to the rules of metadata too, though nothing of it counts there."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(CONTROL):
            try:
                read_metadata(details.invocation_metadata)
            except MetadataError as error:
                return _refusal(str(error))
        return await continuation(details)


def _refusal(message: str) -> Any:
    """A handler that reads no request, so it fits every call."""

    async def refuse(_: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)

    return grpc.stream_stream_rpc_method_handler(refuse)
