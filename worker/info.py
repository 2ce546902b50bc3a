"""What a worker says of itself: ServerInfo and ModelInfo."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf import struct_pb2

from enginelink import envelope, trtllm_affinity
from enginelink.advertised import (
    ENGINE_NAME,
    SCHEMA_RELEASE,
    SCHEMA_REVISION,
    TRANSFER_BACKEND,
    generation_capabilities,
)
from openengine.v1 import kv_pb2, model_pb2, server_pb2
from worker.intake import Served
from worker.settings import WorkerSettings

TRANSFER_PROTOCOL = "kinroute-tcp"
ROLES = {
    "context": server_pb2.ENGINE_ROLE_PREFILL,
    "generation": server_pb2.ENGINE_ROLE_DECODE,
    "aggregated": server_pb2.ENGINE_ROLE_AGGREGATED,
}


def server_info(
    settings: WorkerSettings, *, version: str, instance_id: str, num_pages: int, endpoints: Sequence[kv_pb2.KvEndpoint]
) -> server_pb2.ServerInfo:
    extra = struct_pb2.Struct()
    takes_hints = settings.internal_request_auth_key_file is not None and settings.role != "generation"
    extra.update({trtllm_affinity.CAPABILITY: takes_hints, envelope.CAPABILITY: settings.keys_file is not None})
    return server_pb2.ServerInfo(
        engine_name=ENGINE_NAME,
        engine_version=version,
        engine_role=ROLES[settings.role],
        instance_id=instance_id,
        supported_models=[settings.model_name],
        parallelism=server_pb2.ParallelismInfo(
            tensor_parallel_size=settings.tensor_parallel_size,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_start_rank=0,
        ),
        kv_connector=kv_pb2.KvConnectorInfo(
            enabled=True,
            transfer_backend=TRANSFER_BACKEND,
            local_endpoints=endpoints,
            supported_protocols=[TRANSFER_PROTOCOL],
            supports_remote_prefill=settings.role != "context",
            supports_decode_pull=settings.role != "generation",
            supports_abort_cleanup=True,
            schema_version=1,
        ),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
        schema_release=SCHEMA_RELEASE,
        capacity=server_pb2.DeploymentCapacity(
            kv_block_size=settings.kv_cache_config.tokens_per_block,
            total_kv_blocks=num_pages,
            max_running_requests=settings.scheduler.max_batch_size,
            max_batched_tokens=settings.scheduler.max_num_tokens,
            max_loras=0,
        ),
        extra=extra,
    )


def model_info(settings: WorkerSettings, served: Served, *, reads_text: bool) -> model_pb2.ModelInfo:
    return model_pb2.ModelInfo(
        model_id=settings.model.name,
        served_model_name=served.model_name,
        max_context_length=served.max_context_length,
        max_output_tokens=served.max_context_length - 1,
        supports_text_input=reads_text,
        supports_token_ids_input=True,
        generation=generation_capabilities(1),
        supports_lora=False,
        supports_multimodal=False,
    )
