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

from configuration.addresses import AddressText, is_loopback, split_address
from configuration.listening import AdminListen, AdminSetting, Listener
from configuration.reading import Section, SettingsError, read_settings
from configuration.tls import ClientTls, ServerTls
from worker.kv_settings import KvCacheConfig, require_sense

PREFIX = "KINROUTE_WORKER_"


def _network(text: str) -> str:
    ipaddress.ip_network(text)
    return text


Network = Annotated[str, AfterValidator(_network)]


class Listen(Section):
    """`grpc` serves OpenEngine and EngineLink, `admin` probes, metrics and control calls. Port 0 takes a free one.

    `tls`: of `grpc`, and of the ports where pages are served. `allow_plaintext`: addresses of theirs that are not
    loopback are refused without `tls` or this. `allow_anonymous`: a `grpc` address that is not loopback is refused
    without `keys_file`, `tls.client_ca_file` or this; with this alone, nobody may open links, abort or follow KV
    events.
    """

    grpc: AddressText = "127.0.0.1:7100"
    admin: AdminSetting = AdminListen(address="127.0.0.1:7101")
    allow_plaintext: bool = False
    allow_anonymous: bool = False
    tls: ServerTls | None = None

    @property
    def is_loopback(self) -> bool:
        """Only this machine's users reach `grpc`."""
        return is_loopback(split_address(self.grpc)[0])

    @property
    def trusts_callers(self) -> bool:
        """Whoever calls on `grpc` is this machine's user, or has shown a certificate."""
        return self.is_loopback or (self.tls is not None and self.tls.client_ca_file is not None)


class SchedulerSettings(Section):
    """`max_num_tokens` bounds the new tokens of one step, so the length of a prefill chunk. Of `max_queued_requests` a
    tenant alone may have four fifths, so that there is room for others."""

    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    max_num_tokens: Annotated[int, Field(ge=1)] = 2048
    max_queued_requests: Annotated[int, Field(ge=1)] = 1024


class KvTransfer(Section):
    """`listen_host`: where this worker's ranks serve pages, each on a free port. `allowed_networks`: what it dials.

    `handoff_timeout_s`: how long a context leg's pages wait for the generation worker. `tls`: how others' ports are
    dialled, where they speak TLS; without it, as `listen.tls` says: its `client_ca_file` vouches for them, and its
    certificate is shown to them.
    """

    listen_host: str = "127.0.0.1"
    allowed_networks: tuple[Network, ...] = ("127.0.0.0/8", "::1/128")
    timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    handoff_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    tls: ClientTls | None = None


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
    def listeners(self) -> tuple[Listener, ...]:
        listen, host = self.listen, self.kv_transfer.listen_host
        what = (listen.tls, listen.allow_plaintext)
        grpc_host, _ = split_address(listen.grpc)
        return (
            Listener("listen.grpc", listen.grpc, grpc_host, "listen", *what, "prompts and answers"),
            Listener("kv_transfer.listen_host", host, host, "listen", *what, "the pages of prompts"),
            listen.admin.listener,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know at the start."""
        found = [warning for listener in self.listeners for warning in listener.warnings]
        if not self.listen.trusts_callers and self.keys_file is None:
            found.append("listen.allow_anonymous is true: whoever reaches listen.grpc is served; no edge can be linked")
        return tuple(found)

    @property
    def pull_tls(self) -> ClientTls | None:
        """How pages of other workers are asked for over TCP; None: without TLS."""
        own, tls = self.listen.tls, self.kv_transfer.tls
        if own is None:
            return tls
        if tls is None:
            if own.client_ca_file is None:
                return None
            tls = ClientTls(ca_file=own.client_ca_file)
        if tls.certificate_file is not None or tls.key_file is not None:
            return tls
        return tls.model_copy(update={"certificate_file": own.certificate_file, "key_file": own.key_file})

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
    for listener in settings.listeners:
        listener.require_protection()
    listen = settings.listen
    if not listen.trusts_callers and settings.keys_file is None and not listen.allow_anonymous:
        raise SettingsError(
            f"listen.grpc is {listen.grpc!r}, not a loopback address: set keys_file or listen.tls.client_ca_file, so "
            "that only edges that hold its keys, or a certificate, are linked; or listen.allow_anonymous: true, to "
            "link none and serve OpenEngine alone."
        )
    if listen.tls is not None and settings.pull_tls is None and settings.role != "context":
        raise SettingsError(
            "kv_transfer.tls is missing: listen.tls has no client_ca_file, so it is not known who vouches for the "
            "workers that pages are pulled from; set kv_transfer.tls.ca_file."
        )
    if settings.kv_transfer.listen_host in {"", "0.0.0.0", "::"}:  # noqa: S104 - refused here
        raise SettingsError(
            f"kv_transfer.listen_host is {settings.kv_transfer.listen_host!r}: other workers dial it, so it must be "
            "one address of this machine."
        )
    require_sense(settings.kv_cache_config, settings.role)
