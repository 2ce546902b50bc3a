"""From what a caller claims to what is believed: its conversation, its family, and a parent only where it is proven."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from edge.core.errors import Code, EdgeError
from edge.core.headers import Claim, HeaderNames
from edge.core.kinship import IDLE_S, Excess, Kinship
from edge.core.lineage_token import LineageTokenError, LineageTokens, Stated
from edge.core.namespace import Namespace
from edge.core.types import ConversationKey, FamilyKey, Lineage, Principal, Scope

Proof = Literal["namespace", "token"]
NO_SCOPE = "no scope affinity"
NO_TOKEN = "no lineage token"  # noqa: S105 - a reason, no secret
OTHER_PARENT = "another parent than the token's"
NO_CONVERSATION = "no conversation"


@dataclass(frozen=True, slots=True)
class Believed:
    """`ignored`: why what an agent's own headers said of a parent or an end is not believed, for the receipt.

    `said_by`: the family of headers that named the conversation. `token`: the conversation's own lineage token, for its
    answer; empty where it has no name, or no key may sign.
    """

    lineage: Lineage
    said_by: str = ""
    ignored: str = ""
    token: str = ""

    @property
    def told(self) -> str:
        """What the receipt says of what was ignored."""
        return f"{self.said_by}: {self.ignored}" if self.ignored else ""


class Lineages:
    """Decides what is believed. Every replica with the same keys decides alike, but for what `kinship` has seen.

    `proof`: what proves a parent or an end: a name inside the caller's own namespace, or only a lineage token.
    """

    def __init__(
        self,
        namespace: Namespace,
        tokens: LineageTokens,
        kinship: Kinship,
        *,
        proof: Proof = "namespace",
        names: HeaderNames | None = None,
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.kinship = kinship
        self.names = names or HeaderNames()
        self._proof = proof

    def stated(self, claim: Claim, principal: Principal, now_s: float) -> Stated | None:
        """What the claim's token states; None where there is none. `now_s`: Unix seconds. Raises EdgeError."""
        if claim.token is None:
            return None
        if not principal.may(Scope.AFFINITY):
            raise _forbidden(self.names.lineage)
        try:
            return self.tokens.verify(claim.token, principal.tenant, now_s)
        except LineageTokenError as error:
            raise EdgeError(
                Code.INVALID,
                f"{self.names.lineage} is not believed: send what the parent's last answer had in this header, within "
                "a day and in the same tenant.",
                param=self.names.lineage,
                reason=error.reason,
            ) from error

    def believe(
        self, claim: Claim, stated: Stated | None, principal: Principal, content: bytes, now_s: float
    ) -> Believed:
        """`content`: what identifies a conversation that has no id: its tools, system prompt and first user message.

        `stated`: from the claim's token. Raises EdgeError where an explicit hint may not be believed.
        """
        ignored = self._unproven(claim, stated, principal)
        if ignored:
            claim = _without_hints(claim, final=claim.final and ignored == OTHER_PARENT)
        lineage = self._lineage(claim, stated, principal, content)
        excess = self.kinship.excess(principal, lineage, now_s)
        if excess is not None:
            if claim.explicit or stated is not None:
                raise self._too_many(excess, claim)
            ignored = excess.value
            lineage = self._lineage(_without_hints(claim, final=False), None, principal, content)
        named = claim.conversation is not None or lineage.parent is not None
        token = self.tokens.issue(principal.tenant, lineage, now_s) if named else ""
        return Believed(lineage, claim.family, ignored, token)

    def _unproven(self, claim: Claim, stated: Stated | None, principal: Principal) -> str:
        """Why a parent or an end that the claim names itself is not proven. Raises EdgeError where it is explicit."""
        if claim.parent is None and not claim.final:
            return ""
        names, param = self.names, self.names.final if claim.parent is None else self.names.parent
        if not principal.may(Scope.AFFINITY):
            if claim.explicit:
                raise _forbidden(param)
            return NO_SCOPE
        if self._proof == "token" and stated is None:
            if claim.explicit:
                whose = "the parent's or its own" if claim.parent is None else "the parent's"
                message = f"{param} takes a proof here: send {whose} lineage token in {names.lineage}."
                raise EdgeError(Code.INVALID, message, param=param, reason=NO_TOKEN)
            return NO_TOKEN
        if claim.conversation is None and claim.parent is None and stated is None:
            if claim.explicit:
                message = f"{param} says that a conversation ends, and none is named: send {names.conversation} too."
                raise EdgeError(Code.INVALID, message, param=param, reason=NO_CONVERSATION)
            return NO_CONVERSATION
        if stated is None or claim.parent is None:
            return ""
        if self.namespace.conversation(principal, claim.parent) == stated.conversation:
            return ""
        if claim.explicit:
            message = f"{names.parent} and {names.lineage} name different parents: send one of them."
            raise EdgeError(Code.INVALID, message, param=names.lineage, reason=OTHER_PARENT)
        # Beside a token an agent's own parent is one further down: believed where names are, else the token alone is.
        return OTHER_PARENT if self._proof == "token" else ""

    def _lineage(self, claim: Claim, stated: Stated | None, principal: Principal, content: bytes) -> Lineage:
        """Of a claim that is proven."""
        namespace = self.namespace
        named = claim.parent if claim.parent != claim.conversation else None
        parent = namespace.conversation(principal, named) if named is not None else None
        if parent is None and stated is not None and not claim.side:
            parent = stated.conversation
        if claim.conversation is not None:
            own = namespace.conversation(principal, claim.conversation)
        else:
            own = namespace.derived(principal, parent or "", content)
        if parent == own:
            parent = None
        # Placement depends on the request alone: what the token says, else the root where it is carried, else the
        # parent, else itself.
        near = claim.root or named or claim.placement
        if stated is not None:
            family = stated.family
        elif near is None:
            family = FamilyKey(own)
        else:
            family = FamilyKey(parent if parent and near == named else namespace.conversation(principal, near))
        return Lineage(
            conversation=own,
            family=family,
            parent=parent,
            depth=_depth(claim, named, parent, stated),
            final=claim.final,
            side=claim.side,
        )

    def _too_many(self, excess: Excess, claim: Claim) -> EdgeError:
        param = self.names.parent if claim.token is None else self.names.lineage
        if excess in (Excess.DEEP, Excess.CYCLE):
            message = f"{param} may not be believed: the conversation would be {_AS_WHAT[excess]}."
            return EdgeError(Code.INVALID, message, param=param, reason=excess.value)
        message = f"{param} may not be believed: {_AS_WHAT[excess]}."
        return EdgeError(
            Code.RATE_LIMITED, message, param=param, retryable=True, retry_after_s=IDLE_S, reason=excess.value
        )


_AS_WHAT = {
    Excess.DEEP: "nested too deep",
    Excess.CYCLE: "its own ancestor",
    Excess.PARENTS: "the conversation had too many parents lately",
    Excess.CHILDREN: "the parent has too many children",
    Excess.CONVERSATIONS: "the tenant has too many conversations that are related to others",
}


def _without_hints(claim: Claim, *, final: bool) -> Claim:
    """Who may not name a parent may not name a root either: then a child is a family of its own."""
    return dataclasses.replace(claim, parent=None, root=None, final=final)


def _forbidden(param: str) -> EdgeError:
    message = "This key may not name a parent, nor end a conversation: it lacks the scope affinity."
    return EdgeError(Code.FORBIDDEN, message, param=param, reason=NO_SCOPE)


def _depth(claim: Claim, named: str | None, parent: ConversationKey | None, stated: Stated | None) -> int:
    """Below what the token states, else as far as one request shows it: two where the parent is not the root that is
    carried with it."""
    below = 0 if named is None else 1 if claim.root is None or claim.root == named else 2
    if stated is None or claim.side:
        return below
    if parent is None:
        return stated.depth
    return stated.depth + 1 + (below if parent != stated.conversation else 0)
