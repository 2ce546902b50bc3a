"""A real edge application under uvicorn on a free port, in front of a worker that says what a test wrote down."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anthropic
import httpx
import openai
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from configuration.tls import Kept, ServerMaterial
from edge.app import make_application
from edge.audit import Audit
from edge.authentication import Authentication
from edge.core.admission import Admission, AdmissionLimits
from edge.core.errors import EdgeError
from edge.core.fleet import Fleet
from edge.core.headers import HeaderFamilies
from edge.core.lineage import Lineages
from edge.core.routing import Router, RouterConfig
from edge.core.types import ConversationKey, FinishReason, Lineage, Principal, TokenLogprob, TurnId, WorkerId
from edge.driver import Driver
from edge.http.admin import Admin
from edge.http.models import Catalogue, ServedModel
from edge.http.recent import RecentRequests
from edge.http.route import Parts
from edge.identity import Identities
from edge.legs import LegListener, LegOrder
from edge.limit_metrics import LimitMetrics
from edge.recordings import Recordings
from edge.serving import Server, bind, bound_address
from edge.settings import Limits
from edge.telemetry import Metrics
from edge.tokenizing.model import TextModel
from edge.trust_settings import Jwt
from tests.edge.core.lineages import make_lineages

KEY = "kr-test"
OTHER_KEY = "kr-other"
OPERATOR_KEY = "kr-operator"
MODEL = "tiny"
MAX_CONTEXT = 512
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{% if tools %}<|im_start|>system
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def make_text_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """A tokenizer whose ids are bytes, then the special tokens."""
    byte_of = {character: byte for byte, character in enumerate(_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=byte_of, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True)
class Script:
    """What the worker answers: a token for each byte of `text`, one a step, then `error` or `reason`.

    `hold`: it says nothing before this is set.
    """

    text: str | bytes = "Hello!"
    reason: FinishReason = FinishReason.STOP
    error: EdgeError | None = None
    step_s: float = 0.001
    cached_tokens: int = 0
    hold: threading.Event | None = None

    @property
    def token_ids(self) -> bytes:
        return self.text.encode() if isinstance(self.text, str) else self.text


@dataclass
class ScriptedWorker:
    """A connection to a worker that plays `answer(order)`.

    `orders`: all that came; `cancelled`: request ids; `endings`: how each answer ended, as the edge told.
    """

    answer: Callable[[LegOrder], Script] = lambda order: Script()
    worker_id: WorkerId = field(default_factory=lambda: WorkerId("127.0.0.1:1"))
    orders: list[LegOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    endings: list[FinishReason | None] = field(default_factory=list)
    _playing: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def submit(self, order: LegOrder, listener: LegListener) -> int:
        handle = len(self.orders)
        self.orders.append(order)
        task = asyncio.get_running_loop().create_task(self._play(handle, self.answer(order), order, listener))
        self._playing[handle] = task
        return handle

    def cancel(self, handle: int) -> None:
        if (task := self._playing.pop(handle, None)) is not None:
            self.cancelled.append(self.orders[handle].request_id)
            task.cancel()

    def generating(self, conversation: ConversationKey) -> None:
        """Nothing here is prefilled for somebody else."""

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        self.endings.append(reason)

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None:
        """There is no other worker."""

    async def _play(self, handle: int, script: Script, order: LegOrder, listener: LegListener) -> None:
        while script.hold is not None and not script.hold.is_set():
            await asyncio.sleep(0.005)
        listener.started(script.cached_tokens)
        for token_id in script.token_ids[: order.stops.max_tokens]:
            await asyncio.sleep(script.step_s)
            logprob = None
            if order.sampling.logprobs is not None:
                top = tuple((token_id + at, -0.5 - at) for at in range(order.sampling.logprobs))
                logprob = TokenLogprob(token_id, -0.5, top)
            listener.token(token_id, logprob)
        del self._playing[handle]
        if script.error is not None:
            listener.failed(script.error, retryable=False)
            return
        cut = len(script.token_ids) > order.stops.max_tokens
        listener.finished(FinishReason.LENGTH if cut else script.reason)


@dataclass(frozen=True)
class Served:
    """The running application. `clients`: closed with it; a client that is only dropped leaves its socket to chance."""

    worker: ScriptedWorker
    driver: Driver
    url: str
    admin_url: str
    clients: contextlib.ExitStack

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    def openai(self, key: str = KEY) -> openai.OpenAI:
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0))

    def anthropic(self) -> anthropic.Anthropic:
        return self.clients.enter_context(anthropic.Anthropic(base_url=self.url, api_key=KEY, max_retries=0))

    def client(self, key: str = KEY) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=20.0)

    def refused(self, what: str, reason: str) -> float:
        """How many were, by the counter that operators see."""
        series = f'kinroute_edge_refused_total{{reason="{reason}",what="{what}"}} '
        lines = self.admin("/metrics").text.splitlines()
        return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))

    def admin(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.admin_url}{path}", timeout=20.0)

    def settled(self, is_so: Callable[[], bool]) -> None:
        """Waits until it is."""
        end_s = time.monotonic() + 5.0
        while not is_so():
            assert time.monotonic() < end_s, "it did not come true"
            time.sleep(0.01)

    def settled_leaks(self) -> dict[str, int]:
        """What is held once requests that are just ending have ended."""
        end_s = time.monotonic() + 5.0
        while True:
            leaks: dict[str, int] = self.admin("/kinroute/v1/leaks").json()
            if not any(leaks.values()) or time.monotonic() > end_s:
                return leaks
            time.sleep(0.01)


@contextmanager
def served(
    folder: Path,
    *,
    limits: Limits | None = None,
    admission: AdmissionLimits | None = None,
    ready: bool = True,
    aliases: Sequence[str] = (),
    lineages: Lineages | None = None,
    jwt: Jwt | None = None,
    jwks_interval_s: float = 10.0,
    tls: Kept[ServerMaterial] | None = None,
    admin_tls: Kept[ServerMaterial] | None = None,
    admin_guarded: bool = False,
) -> Iterator[Served]:
    """One worker for both phases. The server has a thread and a loop of its own; everything ends with the block.

    `jwt`: how tokens are believed, besides the three API keys. `admin_guarded`: as where the listener is not loopback.
    """
    limits = limits or Limits()
    worker = ScriptedWorker()
    fleet = Fleet([worker.worker_id], [worker.worker_id])
    if ready:
        fleet.joined(worker.worker_id, "instance", MAX_CONTEXT)
    driver = Driver(fleet, Router(RouterConfig(), fleet), [worker])
    text = TextModel.load(folder)
    keys = {
        hashlib.sha256(KEY.encode()).hexdigest(): Principal("acme", "ann", frozenset({"affinity"})),
        hashlib.sha256(OTHER_KEY.encode()).hexdigest(): Principal("other", "bob", frozenset()),
        hashlib.sha256(OPERATOR_KEY.encode()).hexdigest(): Principal("house", "ops", frozenset({"operator"})),
    }
    metrics = Metrics()
    authentication = Authentication(jwt, keys, min_interval_s=jwks_interval_s)
    parts = Parts(
        Identities(
            authentication.authenticator,
            HeaderFamilies(),
            lineages or make_lineages(),
            Audit(metrics.registry),
            seek=authentication.seek,
        ),
        Admission(admission or AdmissionLimits()),
        Catalogue([ServedModel(MODEL, aliases, text)]),
        driver,
        limits,
        metrics,
        RecentRequests(),
    )
    metrics.registry.register(LimitMetrics(parts.admission))
    http_socket, admin_socket = bind("127.0.0.1:0", "http"), bind("127.0.0.1:0", "admin")
    http = Server(make_application(parts, "1.2.3"), limits, drain_s=1.0, tls=tls)
    operators = parts.identities if admin_guarded else None
    recordings = Recordings(driver.end_listeners, b"id key")
    administered = Admin(driver, parts.admission, parts.recent, parts.metrics, recordings, operators)
    admin = Server(administered, limits, drain_s=1.0, tls=admin_tls, certificate_optional=True)

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(driver.run()), tasks.create_task(authentication.run())]
            await asyncio.gather(http.serve([http_socket]), admin.serve([admin_socket]))
            for task in running:
                task.cancel()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        url = f"{'https' if tls else 'http'}://{bound_address(http_socket)}"
        admin_url = f"{'https' if admin_tls else 'http'}://{bound_address(admin_socket)}"
        with contextlib.ExitStack() as clients:
            yield Served(worker, driver, url, admin_url, clients)
    finally:
        http.should_exit = admin.should_exit = True
        thread.join(20.0)
        text.close()
    assert not thread.is_alive(), "the server did not stop"
