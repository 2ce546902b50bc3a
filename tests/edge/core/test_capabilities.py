"""What an engine says that it can: what it leaves open is not relied on."""

from __future__ import annotations

from typing import Any

import pytest

from edge.core.capabilities import OURS, Capabilities, Needs, Unusable, capabilities_of, require_spoken
from edge.core.life_events import Phase
from openengine.v1 import kv_pb2, model_pb2, server_pb2

CONTEXT, GENERATION, AGGREGATED = Phase.CONTEXT, Phase.GENERATION, Phase.AGGREGATED
BOTH_WAYS = kv_pb2.KvConnectorInfo(
    enabled=True, transfer_backend="nixl", supports_decode_pull=True, supports_remote_prefill=True
)


def said(role: int, connector: kv_pb2.KvConnectorInfo | None = BOTH_WAYS, **model: Any) -> Capabilities:
    info = server_pb2.ServerInfo(engine_role=role, kv_connector=connector)  # type: ignore[arg-type]
    return capabilities_of(info, model_pb2.ModelInfo(**model))


@pytest.mark.parametrize(
    ("role", "phases"),
    [
        (server_pb2.ENGINE_ROLE_UNSPECIFIED, {CONTEXT, GENERATION, AGGREGATED}),
        (server_pb2.ENGINE_ROLE_AGGREGATED, {CONTEXT, GENERATION, AGGREGATED}),
        (server_pb2.ENGINE_ROLE_PREFILL, {CONTEXT}),
        (server_pb2.ENGINE_ROLE_DECODE, {GENERATION}),
        (42, {CONTEXT, GENERATION, AGGREGATED}),
    ],
)
def test_the_role_says_which_phases_it_serves_and_one_that_is_not_known_says_nothing(
    role: int, phases: set[Phase]
) -> None:
    assert said(role).phases == phases


@pytest.mark.parametrize(
    "connector",
    [
        None,
        kv_pb2.KvConnectorInfo(transfer_backend="nixl"),
        kv_pb2.KvConnectorInfo(supports_decode_pull=True, supports_remote_prefill=True),
        kv_pb2.KvConnectorInfo(
            enabled=False, transfer_backend="nixl", supports_decode_pull=True, supports_remote_prefill=True
        ),
    ],
)
def test_without_a_connector_that_says_what_it_does_nothing_is_handed_over(
    connector: kv_pb2.KvConnectorInfo | None,
) -> None:
    assert said(server_pb2.ENGINE_ROLE_AGGREGATED, connector).phases == {AGGREGATED}
    with pytest.raises(Unusable):
        said(server_pb2.ENGINE_ROLE_PREFILL, connector)


def test_our_own_generation_workers_can_prefill_too() -> None:
    info = server_pb2.ServerInfo(
        engine_name="kinroute", engine_role=server_pb2.ENGINE_ROLE_DECODE, kv_connector=BOTH_WAYS
    )

    assert capabilities_of(info, model_pb2.ModelInfo()).phases == {GENERATION, AGGREGATED}


def test_an_engine_that_takes_no_token_ids_is_of_no_use() -> None:
    with pytest.raises(Unusable, match="token ids"):
        said(server_pb2.ENGINE_ROLE_AGGREGATED, supports_token_ids_input=False)


@pytest.mark.parametrize(
    ("output", "most"),
    [
        ({}, None),
        ({"supported": False, "max_top_n": 5}, None),
        ({"supported": True}, 0),
        ({"supported": True, "max_top_n": 5}, 0),
        ({"supported": True, "max_top_n": 5, "candidate_selection_modes": [1]}, 5),
    ],
)
def test_log_probabilities_are_those_that_it_promises(output: dict[str, Any], most: int | None) -> None:
    logprobs = model_pb2.LogprobCapabilities(**output)
    generation = model_pb2.GenerationCapabilities(output_logprobs=logprobs)

    assert said(server_pb2.ENGINE_ROLE_AGGREGATED, generation=generation).max_logprobs == most


def test_an_engine_lacks_what_it_does_not_serve() -> None:
    plain = Capabilities(max_logprobs=None, bypasses=False)

    assert Needs().lacking(plain) is None
    assert Needs(logprobs=0).lacking(plain) == "logprobs"
    assert Needs(logprobs=21).lacking(OURS) == "logprobs"
    assert Needs(bypass=True).lacking(plain) == "bypass_prefix_cache"
    assert Needs(logprobs=20, bypass=True).lacking(OURS) is None


def test_two_engines_make_one_answer_where_their_backends_are_the_same() -> None:
    gives, takes = Capabilities(frozenset({CONTEXT}), "a"), Capabilities(frozenset({GENERATION}), "a")

    assert gives.hands_over_to(takes)
    assert not takes.hands_over_to(gives)
    assert not gives.hands_over_to(Capabilities(frozenset({GENERATION}), "b"))
    assert not Capabilities(frozenset({CONTEXT}), "").hands_over_to(Capabilities(frozenset({GENERATION}), ""))


@pytest.mark.parametrize(("revision", "minimum"), [(0, 1), (2, 1), (1, 0), (1, 2), (0, 0)])
def test_a_revision_that_this_edge_is_not_tested_with_keeps_an_engine_out(revision: int, minimum: int) -> None:
    require_spoken(server_pb2.ServerInfo(schema_revision=1, minimum_client_revision=1))

    with pytest.raises(Unusable, match="revision"):
        require_spoken(server_pb2.ServerInfo(schema_revision=revision, minimum_client_revision=minimum))
