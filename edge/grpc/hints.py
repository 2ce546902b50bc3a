"""What a request's metadata and `extra` say of its place in a family, and of where it should run."""

from __future__ import annotations

from edge.core.errors import EdgeError
from edge.core.lineage import Believed
from edge.grpc.asked import Asked
from edge.grpc.door import Caller
from edge.grpc.errors import invalid
from edge.grpc.signed_hints import SignedHints
from edge.identity import Identities
from enginelink.openengine_metadata import RequestMetadata

GENERATION_ONLY = "generation_only"


def require_rank(metadata: RequestMetadata, asked: Asked) -> None:
    """The rank that a reference names counts; there is but one to wish for. Raises EdgeError."""
    wished = metadata.target_dp_rank
    if wished is None:
        return
    if asked.session is not None and wished != asked.session.dp_rank:
        raise invalid(f"openengine-target-dp-rank is {wished}: kv.session.dp_rank is {asked.session.dp_rank}")
    if asked.session is None and wished != 0:
        raise invalid(f"openengine-target-dp-rank is {wished}: this service is data-parallel rank 0 alone")


def believed_of(identities: Identities, signed: SignedHints, caller: Caller, asked: Asked, model: str) -> Believed:
    """A parent is worth something where there is a prefill: on a generation leg it is refused. `model`: as the request
    wrote it. Raises EdgeError."""
    try:
        parent = signed.parent_of(caller, asked, model)
    except EdgeError as error:
        identities.refused("hint", error, caller.principal)
        raise
    believed = identities.lineage(
        caller.identified,
        body_conversation=None,
        cache_key=caller.metadata.routing_key or None,
        content=asked.identifying_content,
        own=asked.conversation,
        parent=parent,
        explicit=True,
    )
    lineage = believed.lineage
    if asked.request_type == GENERATION_ONLY and (lineage.parent is not None or lineage.final):
        refusal = invalid(
            "lineage goes with a context leg, not with generation_only", reason="hint without context leg"
        )
        identities.refused("hint", refusal, caller.principal)
        raise refusal
    return believed
