"""From what a caller claims to what is believed: its conversation, its family, and a parent only where it is proven."""

from __future__ import annotations

from dataclasses import dataclass

from edge.core.errors import Code, EdgeError
from edge.core.headers import Claim
from edge.core.namespace import Namespace
from edge.core.types import FamilyKey, Lineage, Principal, Scope


@dataclass(frozen=True, slots=True)
class Believed:
    """`ignored`: what an agent's own headers said and may not be believed, for the receipt."""

    lineage: Lineage
    ignored: str = ""


def believe(claim: Claim, principal: Principal, namespace: Namespace, content: bytes) -> Believed:
    """`content`: what identifies a conversation that has no id: its tools, system prompt and first user message.

    A parent is believed inside the caller's own namespace, from a principal with the scope `affinity`. Raises EdgeError
    where an explicit hint may not be believed.
    """
    may = principal.may(Scope.AFFINITY)
    hinted = claim.parent is not None or claim.final
    if hinted and not may and claim.explicit:
        raise EdgeError(
            Code.FORBIDDEN, "This key may not name a parent: it lacks the scope affinity.", reason="no scope affinity"
        )
    ignored = "" if may or not hinted else f"{claim.family}: no scope affinity"
    parent_id = claim.parent if may and claim.parent != claim.conversation else None
    # Who may not name a parent may not name a root either: then a child is a family of its own.
    root_id = claim.root if may else None
    parent = namespace.conversation(principal, parent_id) if parent_id is not None else None
    if claim.conversation is not None:
        own = namespace.conversation(principal, claim.conversation)
    else:
        own = namespace.derived(principal, parent_id or "", content)
    # Placement depends on the request alone: the root where it is carried, else the parent, else itself.
    near = root_id or parent_id or claim.placement
    return Believed(
        Lineage(
            conversation=own,
            family=FamilyKey(own if near is None else namespace.conversation(principal, near)),
            parent=parent,
            depth=_depth(parent_id, root_id),
            final=claim.final and may,
            side=claim.side,
        ),
        ignored,
    )


def _depth(parent_id: str | None, root_id: str | None) -> int:
    """As far as one request shows it: two where the parent is not the root that is carried with it."""
    if parent_id is None:
        return 0
    return 1 if root_id is None or root_id == parent_id else 2
