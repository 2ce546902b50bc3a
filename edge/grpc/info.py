"""What the edge says of itself: ServerInfo, ModelInfo, LoadInfo. ModelInfo advertises exactly what is accepted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf import struct_pb2

from edge.core.fleet import Fleet, Worker
from edge.http.models import ServedModel
from enginelink import envelope, trtllm_affinity
from enginelink.advertised import (
    ENGINE_NAME,
    SCHEMA_RELEASE,
    SCHEMA_REVISION,
    TRANSFER_BACKEND,
    generation_capabilities,
)
from openengine.v1 import kv_pb2, model_pb2, server_pb2


def server_info(
    fleet: Fleet, *, version: str, instance_id: str, models: Sequence[str], takes_signed_hints: bool
) -> server_pb2.ServerInfo:
    """One engine to its callers, whatever stands behind it; what a single worker is, stays the operator's affair."""
    extra = struct_pb2.Struct()
    extra.update(
        {
            trtllm_affinity.CAPABILITY: takes_signed_hints,
            envelope.CAPABILITY: True,
            "kinroute_sealed_sessions": True,
        }
    )
    blocks = {worker.tokens_per_block for worker in fleet.workers.values() if worker.ready}
    return server_pb2.ServerInfo(
        engine_name=ENGINE_NAME,
        engine_version=version,
        engine_role=server_pb2.ENGINE_ROLE_AGGREGATED,
        instance_id=instance_id,
        supported_models=models,
        parallelism=server_pb2.ParallelismInfo(data_parallel_size=1, data_parallel_rank=0, data_parallel_start_rank=0),
        kv_connector=kv_pb2.KvConnectorInfo(
            enabled=True,
            transfer_backend=TRANSFER_BACKEND,
            supports_remote_prefill=True,
            supports_decode_pull=True,
            supports_abort_cleanup=True,
            schema_version=1,
        ),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
        schema_release=SCHEMA_RELEASE,
        capacity=server_pb2.DeploymentCapacity(
            kv_block_size=blocks.pop() or None if len(blocks) == 1 else None, max_loras=0
        ),
        extra=extra,
    )


def model_info(
    model: ServedModel, *, max_context_length: int, max_outputs: int, bypasses_prefix_cache: bool
) -> model_pb2.ModelInfo:
    """Without lengths while no worker is ready."""
    return model_pb2.ModelInfo(
        model_id=model.name,
        served_model_name=model.name,
        served_model_aliases=model.names[1:],
        max_context_length=max_context_length or None,
        max_output_tokens=max_context_length - 1 if max_context_length else None,
        supports_text_input=True,
        supports_token_ids_input=True,
        generation=generation_capabilities(max_outputs, bypasses_prefix_cache=bypasses_prefix_cache),
        supports_lora=False,
        supports_multimodal=False,
    )


def load_info(fleet: Fleet, *, instance_id: str, kv_sessions: int, per_worker: bool) -> server_pb2.LoadInfo:
    """Sums over the ready workers, and with `per_worker` a rank for each worker of the configuration, by address. What
    a worker does not tell is absent."""
    workers = workers_in_order(fleet)
    ready = [worker for worker in workers if worker.ready]
    info = server_pb2.LoadInfo(
        instance_id=instance_id,
        timestamp_unix_nanos=time.time_ns(),
        running_requests=sum(_running(worker) for worker in ready),
        queued_requests=sum(worker.queued for worker in ready),
        active_kv_sessions=kv_sessions,
        used_kv_blocks=_sum([worker.used_blocks for worker in ready]),
        total_kv_blocks=_sum([worker.total_blocks for worker in ready]),
    )
    for index, worker in enumerate(workers if per_worker else ()):
        info.ranks.add(
            data_parallel_rank=index,
            running_requests=_running(worker),
            queued_requests=worker.queued,
            used_kv_blocks=worker.used_blocks,
            total_kv_blocks=worker.total_blocks,
        )
    return info


def workers_in_order(fleet: Fleet) -> list[Worker]:
    """By address: the index is the data-parallel rank under which the operator knows one."""
    return sorted(fleet.workers.values(), key=lambda worker: worker.worker_id)


def _running(worker: Worker) -> int:
    return max(0, worker.load - worker.queued)


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
