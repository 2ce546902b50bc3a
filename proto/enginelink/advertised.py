"""What edges and workers say of themselves alike: the protocol's release, and what `generate_rules` lets pass."""

from __future__ import annotations

from enginelink.generate_rules import MAX_TOP_LOGPROBS
from openengine.v1 import model_pb2

ENGINE_NAME = "kinroute"
SCHEMA_REVISION = 1
SCHEMA_RELEASE = "v0.1.0"
TRANSFER_BACKEND = "kinroute"


def generation_capabilities(
    max_num_sequences: int, *, bypasses_prefix_cache: bool = True
) -> model_pb2.GenerationCapabilities:
    return model_pb2.GenerationCapabilities(
        prompt_logprobs=model_pb2.LogprobCapabilities(supported=False),
        output_logprobs=model_pb2.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=[model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
            max_top_n=MAX_TOP_LOGPROBS,
        ),
        guided_decoding=model_pb2.GuidedDecodingCapabilities(supported=False),
        max_num_sequences=max_num_sequences,
        supports_priority=False,
        supports_stop_in_output=False,
        supports_cache_salt=True,
        supports_prefix_cache_bypass=bypasses_prefix_cache,
    )
