"""The edge's vocabulary. A *turn* is one caller's request for one answer; a *leg* is an attempt of it on one worker."""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass, field
from typing import NewType

from enginelink.retention import Retention

TurnId = NewType("TurnId", str)
WorkerId = NewType("WorkerId", str)
"""The address under which the edge reaches a worker, `host:port`."""
ConversationKey = NewType("ConversationKey", str)
"""A conversation id as workers see it: a keyed hash, never what the caller wrote."""
FamilyKey = NewType("FamilyKey", str)
"""What placement hashes: the family's root where it is known, else the parent, else the conversation itself."""


class Scope(enum.StrEnum):
    AFFINITY = "affinity"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have at a time, or in a minute; None is no limit. `children`: of one parent."""

    requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    conversations: int | None = None
    children: int | None = None

    def over(self, configured: TenantLimits) -> TenantLimits:
        """These; `configured`, where there is none here."""
        pairs = zip(astuple(self), astuple(configured), strict=True)
        return TenantLimits(*(configured if own is None else own for own, configured in pairs))

    def share(self, replicas: int) -> TenantLimits:
        """What each of `replicas` edges may give, so that all give about these; never nothing where these are not."""
        return TenantLimits(*(None if limit is None else _share(limit, replicas) for limit in astuple(self)))


def _share(limit: int, replicas: int) -> int:
    """Rounded to the nearest."""
    return max(min(limit, 1), (2 * limit + replicas) // (2 * replicas))


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. Made by authentication alone. `limits`: instead of the configured ones, where they are not None."""

    tenant: str
    subject: str
    scopes: frozenset[str]
    key_id: str = ""
    limits: TenantLimits = TenantLimits()

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes


@dataclass(frozen=True, slots=True)
class Lineage:
    """Who this request's conversation is, and whose child, after hashing into the caller's namespace.

    `parent` is set only where it was proven; `side` marks a single request beside the conversation (title, summary).
    """

    conversation: ConversationKey
    family: FamilyKey
    parent: ConversationKey | None = None
    depth: int = 0
    final: bool = False
    side: bool = False


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """`temperature` 0 is greedy; `top_k` 0 is off; `logprobs` None is none, 0 the chosen token, n the best n too."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopOptions:
    """What ends an answer on the worker. Stop strings are the edge's own affair (`edge.tokenizing.stops`)."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer to produce: what every attempt at it has in common.

    `token_ids`: the prompt, packed little-endian uint32, so 4 bytes a token. `tenant_tag`: by which workers let tenants
    take turns. `retention`: within what its tenant may ask; None is the default priority for all its blocks.
    `bypass_prefix_cache`: compute the whole prompt.
    """

    turn_id: TurnId
    model: str
    token_ids: bytes
    sampling: SamplingOptions
    stops: StopOptions
    principal: Principal
    lineage: Lineage
    cache_salt: bytes
    traceparent: str = ""
    tracestate: str = ""
    retention: Retention | None = None
    bypass_prefix_cache: bool = False
    tenant_tag: bytes = b""

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability and the best alternatives, (token id, log probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Receipt:
    """The route of one turn, for the caller's logs, `kinroute demo` and the admin listener: who served it, and why.

    `conversation`: the id under which workers know it. `attempts`: how often it was placed; 1 where nothing failed.
    """

    family: str = ""
    conversation: str = ""
    context_worker: str = ""
    generation_worker: str = ""
    attempts: int = 0
    reasons: list[str] = field(default_factory=list)
