"""An edge's settings: one YAML file, overridden by the environment.

`KINROUTE_EDGE_<KEY>` overrides a key, `__` stands between levels: `KINROUTE_EDGE_LISTEN__HTTP=127.0.0.1:9000`.
Values are read as YAML. This module is the only reader of either; secrets stand in files that the settings name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configuration.addresses import AddressText, split_address
from configuration.listening import AdminListen, AdminSetting, Listener
from configuration.reading import Section, SettingsError, read_settings
from configuration.sizes import Bytes
from configuration.tls import ClientTls, ServerTls
from edge.core.kv_index import least_bytes
from edge.trust_settings import Affinity, Auth, HeaderName, require_distinct, require_sense_of_jwt
from enginelink.retention import DEFAULT_PRIORITY, MAX_DURATION_MS, MAX_PRIORITY

PREFIX = "KINROUTE_EDGE_"


Seconds = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class Listen(Section):
    """`http` serves callers, `grpc` those that speak OpenEngine, where it is set; `admin` probes, metrics and control
    calls. Port 0 takes a free one.

    `allow_anonymous`: serve whoever comes without a key; they have no scope, unless `http` and `grpc` are loopback.
    `allow_plaintext`: an address of theirs that is not loopback is refused without `tls` or this.
    """

    http: AddressText = "127.0.0.1:8000"
    grpc: AddressText | None = None
    admin: AdminSetting = AdminListen(address="127.0.0.1:8001")
    allow_anonymous: bool = False
    allow_plaintext: bool = False
    tls: ServerTls | None = None

    @property
    def callers(self) -> tuple[Listener, ...]:
        """The listeners that serve callers."""
        addresses = (("listen.http", self.http), ("listen.grpc", self.grpc))
        return tuple(
            Listener(
                key, address, split_address(address)[0], "listen", self.tls, self.allow_plaintext, "keys and prompts"
            )
            for key, address in addresses
            if address is not None
        )

    @property
    def is_loopback(self) -> bool:
        """Only this machine's users are callers."""
        return all(listener.is_loopback for listener in self.callers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know at the start."""
        found = [warning for listener in (*self.callers, self.admin.listener) for warning in listener.warnings]
        if self.allow_anonymous and not self.is_loopback:
            found.append("listen.allow_anonymous is true: whoever reaches the listeners is served, without a key")
        return tuple(found)


class Model(Section):
    """`path`: a Hugging Face folder with the tokenizer and the chat template. `aliases` are served as `name` is."""

    name: Annotated[str, Field(min_length=1)]
    aliases: tuple[str, ...] = ()
    path: Path


class Router(Section):
    """`load_bound`: a worker with this many times the mean load passes families on, to the first `spill_depth` workers
    of their own order and no further. `min_bound`: with fewer requests it keeps them, however idle the others are, so
    that a few siblings at a time stay together. `clear_gain_tokens`: a worker that holds so many more tokens of a
    prompt than the family's favourite comes before it. `kv_index_max_bytes`: of what is known of all workers' caches.
    """

    type: Literal["conversation", "kv_cache_aware", "load_balancing", "round_robin"] = "conversation"
    spill_depth: Count = 4
    load_bound: Annotated[float, Field(ge=1.0)] = 1.25
    min_bound: Count = 4
    clear_gain_tokens: Count = 1024
    kv_index_max_bytes: Bytes = 4 << 30


class ConditionalDisagg(Section):
    """A prompt with at most this many tokens that are not cached is prefilled by the generation worker itself."""

    max_local_prefill_length: Annotated[int, Field(ge=0)] = 0


class Limits(Section):
    """What one caller may cost. Times are deadlines; those without a tenant in their name are of one connection.

    `body_timeout_s`: for a body, plus a second for each `body_bytes_per_s` of it that came.
    `stalled_client_timeout_s`: how long a caller may read nothing of what was written to it.
    `client_buffer_chars`: text that may wait for a slow caller before its answer is cancelled. `stream_comment_s`: how
    often a stream that has nothing to say gets a comment, and how long its status line waits for the first token.
    `replicas`: how many edges share each tenant's limits; every one enforces its part.
    `tenant_conversations`: those of one tenant that were parent or child in the last ten minutes. `parent_children`: of
    one conversation in that time. `lineage_depth`: how far a child may be from its root.
    `tenant_max_retention_priority`: what a request that asks for more for its blocks gets.
    `tenant_max_retention_duration_ms`: how long a priority above the default may hold; without it durations are not
    taken, and what is asked holds for ever. `tenant_bypass_prefix_cache`: whether a request may have its prompt
    computed as if nothing were cached; where not, it is served from the cache.
    """

    connections: Count = 16_384
    header_bytes: Count = 65_536
    header_timeout_s: Seconds = 10.0
    body_bytes: Count = 8_388_608
    body_timeout_s: Seconds = 20.0
    body_bytes_per_s: Count = 65_536
    keep_alive_timeout_s: Seconds = 75.0
    stalled_client_timeout_s: Seconds = 60.0
    client_buffer_chars: Count = 262_144
    stream_comment_s: Seconds = 10.0
    requests: Count = 8_192
    replicas: Count = 1
    messages: Count = 10_000
    choices: Count = 16
    prompts: Count = 64
    tenant_requests: Count = 1_024
    tenant_requests_per_minute: Count | None = None
    tenant_tokens_per_minute: Count | None = None
    tenant_conversations: Count = 16_384
    parent_children: Count = 1_024
    lineage_depth: Count = 16
    tenant_max_retention_priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = DEFAULT_PRIORITY
    tenant_max_retention_duration_ms: Annotated[int, Field(ge=1, le=MAX_DURATION_MS)] | None = None
    tenant_bypass_prefix_cache: bool = True


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class EdgeSettings(Section):
    """Everything that `kinroute edge` reads.

    `context_servers` and `generation_servers`: addresses of workers; one that stands in both does both phases.
    `worker_protocol`: how to speak to them; `enginelink` is `openengine` to an engine that knows nothing else.
    `subagent_affinity_scope`: whether families come together on context workers alone, or on generation workers too;
    finished sub-agents are demoted on context workers in any case. `worker_tls`: they are dialled over TLS.
    `internal_request_auth_key_file`: holds the key under which engines that speak TensorRT-LLM's dialect are told of
    parents. `cache_isolation`: whose requests may share cached prefixes. `allow_shared_prefix_cache`: OpenEngine
    engines that cannot keep tenants' prefix caches apart are used too. `drain_timeout_s`: how long answers may go on
    after SIGTERM.
    """

    listen: Listen = Listen()
    model: Model
    context_servers: tuple[AddressText, ...] = ()
    generation_servers: Annotated[tuple[AddressText, ...], Field(min_length=1)]
    worker_protocol: Literal["enginelink", "openengine"] = "enginelink"
    worker_tls: ClientTls | None = None
    router: Router = Router()
    conditional_disagg_config: ConditionalDisagg = ConditionalDisagg()
    affinity: Affinity = Affinity()
    subagent_affinity_scope: Literal["context", "both"] = "context"
    conversation_affinity_header_for_subagents: HeaderName | None = None
    cache_isolation: Literal["tenant", "subject"] = "tenant"
    allow_shared_prefix_cache: bool = False
    keys_file: Path | None = None
    internal_request_auth_key_file: Path | None = None
    auth: Auth = Auth()
    limits: Limits = Limits()
    drain_timeout_s: Annotated[float, Field(ge=0.0)] = 10.0
    log: Log = Log()


def load_settings(file: Path | None, environment: Mapping[str, str] = os.environ) -> EdgeSettings:
    """The settings in `file` under those in `environment`. Raises SettingsError."""
    settings = read_settings(EdgeSettings, file, environment, PREFIX)
    _require_sense(settings)
    if settings.auth.jwt is not None:
        require_sense_of_jwt(settings.auth.jwt)
    return settings


def _require_sense(settings: EdgeSettings) -> None:
    """What one key alone cannot show."""
    listen = settings.listen
    for listener in (*listen.callers, listen.admin.listener):
        listener.require_protection()
    if not listen.allow_anonymous and settings.keys_file is None:
        raise SettingsError(
            "keys_file is missing: it holds the API keys, and the keys under which ids are hashed and lineage is "
            "signed; nothing is served without. Set it, or listen.allow_anonymous: true."
        )
    _require_affinity_sense(settings)
    taken_by: dict[str, str] = {}
    for listener in (*listen.callers, listen.admin.listener):
        if listener.address.endswith(":0"):
            continue
        if listener.address in taken_by:
            first = taken_by[listener.address]
            raise SettingsError(f"{first} and {listener.key} are both {listener.address!r}: give each its own port.")
        taken_by[listener.address] = listener.key
    taken = {name for name in settings.model.aliases if name == settings.model.name}
    if taken:
        raise SettingsError(f"model.aliases holds {taken.pop()!r}, which is model.name itself.")
    servers = settings.context_servers + settings.generation_servers
    for server in servers:
        if split_address(server)[1] == 0:
            raise SettingsError(f"context_servers or generation_servers holds {server!r}: port 0 is no worker's.")
    least = least_bytes(len(set(servers)))
    if settings.router.kv_index_max_bytes < least:
        raise SettingsError(
            f"router.kv_index_max_bytes is {settings.router.kv_index_max_bytes}: it must be at least {least}, which is "
            f"{least_bytes(1)} for each worker."
        )


def _require_affinity_sense(settings: EdgeSettings) -> None:
    affinity = settings.affinity
    if affinity.namespace == "tenant" and affinity.proof == "token":
        raise SettingsError(
            "affinity.namespace is 'tenant' and affinity.proof is 'token': whoever may name all conversations of its "
            "tenant needs no proof of one; choose one of them."
        )
    if affinity.proof == "token" and settings.keys_file is None:
        raise SettingsError(
            "affinity.proof is 'token', but keys_file is missing: it holds the keys that sign lineage tokens."
        )
    require_distinct(affinity.headers)
