"""A worker's settings: one YAML file, overridden by the environment.

`KINROUTE_WORKER_<KEY>` overrides a key, `__` stands between levels: `KINROUTE_WORKER_LISTEN__GRPC=127.0.0.1:7000`.
Values are read as YAML. This module is the only reader of either.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from configuration.reading import Section, SettingsError, read_settings
from worker.addresses import Address, is_loopback
from worker.kv_settings import KvCacheConfig, require_sense

PREFIX = "KINROUTE_WORKER_"


def _network(text: str) -> str:
    ipaddress.ip_network(text)
    return text


def _address(text: str) -> str:
    Address.parse(text)
    return text


AddressText = Annotated[str, AfterValidator(_address)]
Network = Annotated[str, AfterValidator(_network)]


class Listen(Section):
    """`grpc` serves OpenEngine and EngineLink, `admin` probes, metrics and control calls. Port 0 takes a free one.

    `allow_plaintext`: a `grpc` address that is not loopback is refused without it: what travels there is not encrypted.
    """

    grpc: AddressText = "127.0.0.1:7100"
    admin: AddressText = "127.0.0.1:7101"
    allow_plaintext: bool = False


class SchedulerSettings(Section):
    """`max_num_tokens` bounds the new tokens of one step, so the length of a prefill chunk."""

    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    max_num_tokens: Annotated[int, Field(ge=1)] = 2048
    max_queued_requests: Annotated[int, Field(ge=1)] = 1024


class KvTransfer(Section):
    """`listen_host`: where this worker's ranks serve pages, each on a free port. `allowed_networks`: what it dials.

    `handoff_timeout_s`: how long a context leg's pages wait for the generation worker.
    """

    listen_host: str = "127.0.0.1"
    allowed_networks: tuple[Network, ...] = ("127.0.0.0/8", "::1/128")
    timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    handoff_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0


class Group(Section):
    """The ranks of this worker as one group.

    `control_port` and `token_file` matter only where torchrun starts the ranks: the port of rank 0's control channel
    (default: MASTER_PORT + 1), and a file that holds the secret that all ranks share.
    `step_timeout_s`: a step that takes longer means that the group is stuck; it is killed and started again.
    """

    control_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    token_file: Path | None = None
    step_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    report_timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    start_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class WorkerSettings(Section):
    """Everything that `kinroute worker` reads.

    `threads_per_rank`: threads of the model's arithmetic in each rank; without it, the cores of this machine shared
    evenly among the ranks. `internal_request_auth_key_file`: holds the key of TensorRT-LLM's signed hints, which are
    taken only with it. `drain_timeout_s`: how long running requests may go on after SIGTERM.
    """

    model: Path
    served_model_name: str = ""
    role: Literal["context", "generation", "aggregated"] = "aggregated"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads_per_rank: Annotated[int, Field(ge=1)] | None = None
    listen: Listen = Listen()
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    scheduler: SchedulerSettings = SchedulerSettings()
    kv_transfer: KvTransfer = KvTransfer()
    group: Group = Group()
    keys_file: Path | None = None
    internal_request_auth_key_file: Path | None = None
    drain_timeout_s: Annotated[float, Field(ge=0.0)] = 10.0
    log: Log = Log()

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def rank_threads(self) -> int:
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // self.tensor_parallel_size)


def load_settings(file: Path | None, environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    """The settings in `file` under those in `environment`. Raises SettingsError."""
    settings = read_settings(WorkerSettings, file, environment, PREFIX)
    _require_sense(settings)
    if settings.kv_cache_config.recording_dir is not None:
        return settings
    cache = settings.kv_cache_config.model_copy(update={"recording_dir": _recordings_folder(environment)})
    return settings.model_copy(update={"kv_cache_config": cache})


def _recordings_folder(environment: Mapping[str, str]) -> Path | None:
    """In the state folder, by the XDG base directories; None where there is no home."""
    for variable, below in (("XDG_STATE_HOME", "kinroute/recordings"), ("HOME", ".local/state/kinroute/recordings")):
        if environment.get(variable, "").startswith("/"):
            return Path(environment[variable]) / below
    return None


def _require_sense(settings: WorkerSettings) -> None:
    """What one key alone cannot show."""
    if not (settings.model / "config.json").is_file():
        raise SettingsError(
            f"model is {str(settings.model)!r}: no config.json there; give a Hugging Face model folder."
        )
    grpc = Address.parse(settings.listen.grpc)
    if not is_loopback(grpc.host):
        if not settings.listen.allow_plaintext:
            raise SettingsError(
                f"listen.grpc is {settings.listen.grpc!r}, not a loopback address: requests would travel unencrypted; "
                "set listen.allow_plaintext: true if something else protects that network."
            )
        if settings.keys_file is None:
            raise SettingsError(
                f"listen.grpc is {settings.listen.grpc!r}, not a loopback address: set keys_file, so that only "
                "edges that hold its keys are served."
            )
    if not is_loopback(Address.parse(settings.listen.admin).host):
        raise SettingsError(
            f"listen.admin is {settings.listen.admin!r}: its control calls ask for no key, so it must be a loopback "
            "address."
        )
    if settings.kv_transfer.listen_host in {"", "0.0.0.0", "::"}:  # noqa: S104 - refused here
        raise SettingsError(
            f"kv_transfer.listen_host is {settings.kv_transfer.listen_host!r}: other workers dial it, so it must be "
            "one address of this machine."
        )
    require_sense(settings.kv_cache_config, settings.role)
