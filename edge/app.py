"""An edge's entry: builds the parts, passes them on, serves until told to stop."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import structlog
import uvloop

from configuration.grpc_tls import server_credentials
from configuration.reading import SettingsError, read_secret
from configuration.tls import Watch
from edge.audit import Audit
from edge.authentication import Authentication
from edge.certificates import Certificates
from edge.channels import Channels
from edge.core.admission import Admission, AdmissionLimits
from edge.core.fleet import Fleet
from edge.core.headers import HeaderFamilies, HeaderNames
from edge.core.kinship import Kinship
from edge.core.lineage import Lineages
from edge.core.lineage_token import LineageTokens
from edge.core.namespace import Namespace
from edge.core.routing import Router, RouterConfig
from edge.core.seals import Seals
from edge.core.types import Principal, Scope, TenantLimits
from edge.driver import Driver
from edge.grpc.server import GrpcServer
from edge.grpc.signed_hints import SignedHints
from edge.hints import Hints
from edge.http.admin import Admin
from edge.http.api import make_api
from edge.http.application import Application
from edge.http.asgi import App
from edge.http.chat import Chat
from edge.http.completions import Completions
from edge.http.models import Catalogue, ServedModel
from edge.http.recent import RecentRequests
from edge.http.route import AnswerRoute, Parts
from edge.http.unbuilt import messages, responses
from edge.identity import Identities
from edge.key_watch import WatchedFile
from edge.keyring import Keyring, KeyringError
from edge.kv_metrics import KvMetrics
from edge.legs import Connection
from edge.limit_metrics import LimitMetrics
from edge.recordings import Recordings
from edge.serving import Server, bind, bound_address
from edge.settings import EdgeSettings
from edge.signing import EnvelopeSigner
from edge.telemetry import Metrics, configure_logs
from edge.tokenizing.folder import FolderError
from edge.tokenizing.model import TextModel
from edge.worker_either import EitherWorker
from edge.worker_link import WorkerLink
from edge.worker_openengine import OpenEngineWorker
from enginelink.envelope import Key

BAD_CONFIGURATION = 78
READY_POLL_S = 0.05
ADMIN_DRAIN_S = 1.0
Say = Callable[[dict[str, str]], None]
log = structlog.get_logger()


def run_edge(settings: EdgeSettings) -> int:
    """Returns 0 once told to stop, or 78 where the configuration cannot be used; says why on stderr."""
    configure_logs(settings.log, part="edge")
    try:
        edge = Edge(settings)
        uvloop.run(_until_signalled(edge))
    except (SettingsError, KeyringError, FolderError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    return 0


class Edge:
    """Everything of one edge. Building it reads files and binds its sockets; `serve` runs it once."""

    def __init__(self, settings: EdgeSettings) -> None:
        self._settings = settings
        self._certificates = certificates = Certificates.read(settings)
        self._keys = None if settings.keys_file is None else _watched_keys(settings.keys_file)
        keyring = None if self._keys is None else self._keys.value
        metrics, recent = Metrics(), RecentRequests()
        id_key = secrets.token_bytes(32) if keyring is None else keyring.id_key
        lineages = _lineages(settings, keyring, id_key)
        self._authentication = _authentication(settings, keyring)
        identities = _identities(self._authentication, lineages, Audit(metrics.registry))
        self._text = TextModel.load(settings.model.path)
        catalogue = Catalogue([ServedModel(settings.model.name, settings.model.aliases, self._text)])
        self._channels = Channels(certificates.workers)
        self._edge_id = f"edge-{secrets.token_hex(8)}"
        signer = EnvelopeSigner(self._edge_id, () if keyring is None else keyring.envelope_keys)
        self._affinity_key = _watched_affinity_key(settings)
        hints = Hints(signer, b"" if self._affinity_key is None else self._affinity_key.value, self._look_for_keys)
        self._affinity_key_users = [hints.use_affinity_key]
        metrics.registry.register(hints)
        self.driver = _driver(settings, self._edge_id, hints, self._channels)
        self._key_users: list[Callable[[Keyring], None]] = [
            lambda keys: self._authentication.authenticator.use(keys.principals, keys.ends_s),
            lambda keys: signer.use(keys.envelope_keys),
            lambda keys: lineages.tokens.use(keys.lineage_keys),
            lambda keys: self._seals.use(keys.lineage_keys),
        ]
        self._signed_hint_keys = _watched_hint_keys(settings)
        self._signed_hints = SignedHints({tenant: file.value for tenant, file in self._signed_hint_keys.items()})
        limits = settings.limits
        admission = Admission(
            AdmissionLimits(
                limits.requests,
                TenantLimits(
                    limits.tenant_requests, limits.tenant_requests_per_minute, limits.tenant_tokens_per_minute
                ),
                limits.replicas,
            )
        )
        metrics.registry.register(LimitMetrics(admission))
        metrics.registry.register(KvMetrics(self.driver.fleet))
        self._seals = Seals((_key_of_this_start(),) if keyring is None else keyring.lineage_keys)
        self._parts = Parts(identities, admission, catalogue, self.driver, limits, metrics, recent)
        application = make_application(self._parts, metadata.version("kinroute"))
        listen = settings.listen
        operators = None if listen.admin.listener.is_loopback else identities
        self._recordings = Recordings(self.driver.end_listeners, id_key)
        admin = Admin(self.driver, admission, recent, metrics, self._recordings, operators)
        self._http_socket = bind(listen.http, "listen.http")
        self._admin_socket = bind(listen.admin.address, "listen.admin")
        self._http = Server(application, limits, drain_s=settings.drain_timeout_s, tls=certificates.callers)
        self._admin = Server(admin, limits, drain_s=ADMIN_DRAIN_S, tls=certificates.admin, certificate_optional=True)

    @property
    def http_address(self) -> str:
        return bound_address(self._http_socket)

    @property
    def admin_address(self) -> str:
        return bound_address(self._admin_socket)

    async def serve(self, stop: asyncio.Event, say: Say) -> None:
        """Until `stop` is set; then no new connection is taken, and answers go on for the drain timeout at most."""
        listening = {"event": "listening", "http": self.http_address, "admin": self.admin_address}
        grpc_server = await self._start_grpc()
        if grpc_server is not None:
            listening["grpc"] = grpc_server.address
        for warning in self._settings.listen.warnings:
            log.warning(warning)
        say(listening)
        watch = Watch(self._certificates.all)
        # All that was built until here lives as long as the process: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        async with asyncio.TaskGroup() as tasks:
            driving = tasks.create_task(self.driver.run())
            keeping = [tasks.create_task(self._authentication.run())]
            if self._keys is not None:
                keeping.append(tasks.create_task(self._keys.watch(self._key_users)))
            if self._affinity_key is not None:
                keeping.append(tasks.create_task(self._affinity_key.watch(self._affinity_key_users)))
            for tenant, file in self._signed_hint_keys.items():
                keeping.append(tasks.create_task(file.watch([partial(self._signed_hints.use, tenant)])))
            administering = tasks.create_task(self._admin.serve([self._admin_socket]))
            serving = tasks.create_task(self._http.serve([self._http_socket]))
            announcing = tasks.create_task(self._announce_ready(say))
            await stop.wait()
            announcing.cancel()
            self._http.should_exit = True
            if grpc_server is not None:
                await grpc_server.stop(self._settings.drain_timeout_s)
            await serving
            self._recordings.stop()
            self._admin.should_exit = True
            await administering
            driving.cancel()
            for task in keeping:
                task.cancel()
        watch.close()
        self._text.close()
        self._parts.bodies.close()

    async def _start_grpc(self) -> GrpcServer | None:
        """None where it is not configured. Raises SettingsError."""
        address = self._settings.listen.grpc
        if address is None:
            return None
        server = GrpcServer(
            self._parts,
            self._seals,
            self._channels.open,
            instance_id=self._edge_id,
            version=metadata.version("kinroute"),
            signed_hints=self._signed_hints,
        )
        tls = self._certificates.callers
        await server.start(address, None if tls is None else server_credentials(tls))
        return server

    async def _look_for_keys(self) -> None:
        """A worker did not believe what is signed with those that this edge has."""
        if self._keys is not None:
            await self._keys.look(self._key_users)
        if self._affinity_key is not None:
            await self._affinity_key.look(self._affinity_key_users)

    async def _announce_ready(self, say: Say) -> None:
        while not self.driver.model_ready:  # noqa: ASYNC110 - once a start; the fleet has no waiters
            await asyncio.sleep(READY_POLL_S)
        say({"event": "ready"})


def make_application(parts: Parts, version: str) -> Application:
    """What the HTTP listener serves."""
    posts: dict[str, App] = {kind.path: AnswerRoute(kind, parts) for kind in (Chat(), Completions())}
    posts |= {"/v1/messages": messages, "/v1/messages/count_tokens": messages, "/v1/responses": responses}
    return Application(posts, make_api(parts.identities, parts.catalogue, parts.driver, version))


async def _until_signalled(edge: Edge) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await edge.serve(stop, _say)


def _say(news: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def _key_of_this_start() -> Key:
    return Key("start", secrets.token_bytes(32))


def _lineages(settings: EdgeSettings, keyring: Keyring | None, id_key: bytes) -> Lineages:
    """`id_key`: under which ids are hashed. Without a key file, which only an anonymous edge may lack, it ends with it.

    Raises SettingsError where tokens must prove and no key signs them.
    """
    lineage_keys = () if keyring is None else keyring.lineage_keys
    if settings.affinity.proof == "token" and not lineage_keys:
        raise SettingsError(
            f"affinity.proof is 'token', but {settings.keys_file} has no lineage_keys, which sign lineage tokens: run "
            "kinroute keys rotate."
        )
    affinity, limits = settings.affinity, settings.limits
    names = HeaderNames(
        **affinity.headers.model_dump(), others_parent=settings.conversation_affinity_header_for_subagents or ""
    )
    return Lineages(
        Namespace(id_key, settings.cache_isolation, affinity.namespace),
        LineageTokens(lineage_keys, affinity.token_life_s),
        Kinship(
            TenantLimits(conversations=limits.tenant_conversations, children=limits.parent_children),
            limits.lineage_depth,
            replicas=limits.replicas,
        ),
        proof=affinity.proof,
        names=names,
    )


def _watched_keys(file: Path) -> WatchedFile[Keyring]:
    return WatchedFile(file, lambda: Keyring.load(file))


def _watched_affinity_key(settings: EdgeSettings) -> WatchedFile[bytes] | None:
    file = settings.internal_request_auth_key_file
    return None if file is None else WatchedFile(file, lambda: read_secret(file, "internal_request_auth_key_file"))


def _watched_hint_keys(settings: EdgeSettings) -> dict[str, WatchedFile[bytes]]:
    """By tenant."""

    def watched(tenant: str, file: Path) -> WatchedFile[bytes]:
        return WatchedFile(file, lambda: read_secret(file, f"affinity.trtllm_key_files.{tenant}"))

    return {tenant: watched(tenant, file) for tenant, file in settings.affinity.trtllm_key_files.items()}


def _authentication(settings: EdgeSettings, keyring: Keyring | None) -> Authentication:
    scopes = frozenset({Scope.AFFINITY}) if settings.listen.is_loopback else frozenset[Scope]()
    anonymous = Principal("default", "anonymous", scopes)
    return Authentication(
        settings.auth.jwt,
        {} if keyring is None else keyring.principals,
        ends_s={} if keyring is None else keyring.ends_s,
        anonymous=anonymous if settings.listen.allow_anonymous else None,
    )


def _identities(authentication: Authentication, lineages: Lineages, audit: Audit) -> Identities:
    return Identities(
        authentication.authenticator, HeaderFamilies(lineages.names), lineages, audit, seek=authentication.seek
    )


def _driver(settings: EdgeSettings, edge_id: str, hints: Hints, channels: Channels) -> Driver:
    router = settings.router
    fleet = Fleet(
        settings.context_servers or settings.generation_servers,
        settings.generation_servers,
        kv_index_max_bytes=router.kv_index_max_bytes,
    )
    config = RouterConfig(
        router.type,
        router.spill_depth,
        router.load_bound,
        router.min_bound,
        settings.conditional_disagg_config.max_local_prefill_length,
        router.clear_gain_tokens,
        settings.subagent_affinity_scope,
    )
    connections: list[Connection] = []
    for worker_id in fleet.workers:
        openengine = OpenEngineWorker(
            worker_id,
            settings.model.name,
            fleet,
            hints,
            channels,
            shares_caches=settings.allow_shared_prefix_cache,
        )
        if settings.worker_protocol == "openengine":
            connections.append(openengine)
        else:
            connections.append(EitherWorker(WorkerLink(worker_id, edge_id, fleet, hints, channels), openengine))
    return Driver(fleet, Router(config, fleet), connections)
