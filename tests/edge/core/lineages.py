"""What decides lineage, with keys and limits of a test's own."""

from __future__ import annotations

from collections.abc import Sequence

from edge.core.kinship import Kinship
from edge.core.lineage import Lineages, Proof
from edge.core.lineage_token import LineageTokens
from edge.core.namespace import Isolation, Namespace
from edge.core.types import TenantLimits
from enginelink.compact_jwt import Key

ID_KEY = b"k" * 32
LINEAGE_KEY = Key("l1", b"l" * 32)


def make_lineages(
    *,
    id_key: bytes = ID_KEY,
    keys: Sequence[Key] = (LINEAGE_KEY,),
    trust: Isolation = "subject",
    proof: Proof = "namespace",
    limits: TenantLimits | None = None,
    depth: int = 16,
) -> Lineages:
    """Two with the same arguments are two replicas."""
    return Lineages(
        Namespace(id_key, trust=trust), LineageTokens(keys), Kinship(limits or TenantLimits(), depth), proof=proof
    )
