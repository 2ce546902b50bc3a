"""What gRPC metadata says of a request, by OpenEngine's rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from enginelink.openengine_metadata import MetadataError, read_metadata
from worker.refusal import invalid, unsupported

CONTROL = "/openengine.v1.Control/"
LINEAGE = "kinroute-lineage"
FOREIGN_HINT = "x-trtllm-subagent-affinity-"


@dataclass(frozen=True, slots=True)
class Metadata:
    target_dp_rank: int | None = None
    lineage: str = ""

    @classmethod
    def read(cls, pairs: Iterable[tuple[str, str | bytes]]) -> Metadata:
        """Raises Refused where an `openengine-` key is repeated or malformed."""
        pairs = list(pairs)
        lineage: list[str] = []
        for key, value in pairs:
            if key.startswith(FOREIGN_HINT):
                raise unsupported(f"{key}: this worker takes lineage in {LINEAGE} alone")
            if key == LINEAGE:
                lineage.append(value if isinstance(value, str) else value.decode(errors="replace"))
        if len(lineage) > 1:
            raise invalid(f"{LINEAGE} is given twice")
        try:
            read = read_metadata(pairs)
        except MetadataError as error:
            raise invalid(str(error)) from error
        return cls(target_dp_rank=read.target_dp_rank, lineage="".join(lineage))


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
