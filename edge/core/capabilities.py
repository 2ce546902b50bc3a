"""What an engine says that it can, read by OpenEngine's rules: what is unknown is not relied on. Pure.

Peers of before `schema_release` number a few things otherwise: the connector's `schema_version`, HealthState 4 and 5,
ErrorCode 11 and 12. Nothing here, and nothing in `edge`, tells these apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.core.life_events import Phase
from edge.core.types import Turn
from openengine.v1 import model_pb2, server_pb2

TESTED_REVISIONS = range(1, 2)
OUR_NAME = "kinroute"
TOP_N = model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N
_PHASES_OF_ROLE = {
    server_pb2.ENGINE_ROLE_PREFILL: frozenset({Phase.CONTEXT}),
    server_pb2.ENGINE_ROLE_DECODE: frozenset({Phase.GENERATION}),
    server_pb2.ENGINE_ROLE_AGGREGATED: frozenset(Phase),
    # The role is each request's.
    server_pb2.ENGINE_ROLE_UNSPECIFIED: frozenset(Phase),
}


class Unusable(Exception):
    """Raised when an engine cannot be given requests; says why, for an operator."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`connector`: its transfer backend, empty where it hands nothing over. `max_logprobs`: how many candidates beside
    a token; None: no log probabilities. `salts`: it keeps prefix caches apart. `bypasses`: it can leave its own alone.
    """

    phases: frozenset[Phase] = frozenset(Phase)
    connector: str = OUR_NAME
    max_logprobs: int | None = 20
    salts: bool = True
    bypasses: bool = True

    def hands_over_to(self, generation: Capabilities) -> bool:
        """Whether a context leg here and a generation leg there make one answer."""
        return (
            Phase.CONTEXT in self.phases
            and Phase.GENERATION in generation.phases
            and bool(self.connector)
            and self.connector == generation.connector
        )


OURS = Capabilities()
"""What a worker of ours can that does both phases."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a turn asks for that not every engine has."""

    logprobs: int | None = None
    bypass: bool = False

    def lacking(self, can: Capabilities) -> str | None:
        """The option that an engine does not serve; None where it serves all."""
        if self.logprobs is not None and (can.max_logprobs is None or self.logprobs > can.max_logprobs):
            return "logprobs"
        return "bypass_prefix_cache" if self.bypass and not can.bypasses else None


NO_NEEDS = Needs()


def needs_of(turn: Turn) -> Needs:
    return Needs(turn.sampling.logprobs, turn.bypass_prefix_cache)


def require_spoken(info: server_pb2.ServerInfo) -> None:
    """Raises Unusable outside of the revisions that this edge is tested with."""
    if info.schema_revision not in TESTED_REVISIONS or not 1 <= info.minimum_client_revision <= TESTED_REVISIONS[-1]:
        raise Unusable(
            f"it speaks revision {info.schema_revision} of OpenEngine, to clients from {info.minimum_client_revision} "
            f"on, and this edge {TESTED_REVISIONS[-1]}"
        )


def capabilities_of(info: server_pb2.ServerInfo, model: model_pb2.ModelInfo) -> Capabilities:
    """Raises Unusable: token ids are not taken, or nothing can be served."""
    if model.HasField("supports_token_ids_input") and not model.supports_token_ids_input:
        raise Unusable("it takes no token ids")
    phases = _PHASES_OF_ROLE.get(info.engine_role, frozenset(Phase))
    if info.engine_name == OUR_NAME and Phase.GENERATION in phases:
        phases |= {Phase.AGGREGATED}
    connector = info.kv_connector
    backend = "" if connector.HasField("enabled") and not connector.enabled else connector.transfer_backend
    if not backend or not connector.supports_decode_pull:
        phases -= {Phase.CONTEXT}
    if not backend or not connector.supports_remote_prefill:
        phases -= {Phase.GENERATION}
    if not phases:
        raise Unusable("it serves one phase alone, and says of no connector that it takes or gives KV")
    generation = model.generation
    return Capabilities(
        phases,
        backend,
        _max_logprobs(generation.output_logprobs),
        generation.supports_cache_salt,
        generation.supports_prefix_cache_bypass,
    )


def _max_logprobs(said: model_pb2.LogprobCapabilities) -> int | None:
    if not said.supported:
        return None
    # Without a bound nothing is promised but the tokens' own.
    return said.max_top_n if TOP_N in said.candidate_selection_modes else 0
