"""A real edge process in front of a fake worker, as an attacker sees it: addresses, and a log that must stay clean."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.attacks.callers import BOB, PROMPT, Caller, JwtIssuer, add_callers, secrets_in
from tests.e2e.system import Part, System
from tests.edge.fakes import fake_worker
from tests.edge.http.harness import make_text_folder

MODEL = "tiny"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
WAIT_S = 20.0
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]{10,}\.")


@dataclass(frozen=True)
class Reply:
    """What came back over a connection; `status` 0: it was closed without a word."""

    status: int
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)["error"]
        return told


@dataclass(frozen=True)
class Doors:
    edge: Part
    system: System
    issuer: JwtIssuer

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = str(self.edge.members["http"]).rpartition(":")
        return host, int(port)

    def client(self, caller: Caller) -> httpx.Client:
        return httpx.Client(base_url=self.edge.http, headers=caller.headers, timeout=WAIT_S)

    def ask(self, caller: Caller, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        with self.client(caller) as client:
            return client.post(CHAT, json=BODY | body, headers=headers)

    def send(self, headers: Sequence[tuple[bytes, bytes]], body: bytes, path: str = CHAT) -> Reply:
        """Bytes as they are, on a connection of their own."""
        lines = [b"POST " + path.encode() + b" HTTP/1.1", b"host: x", b"connection: close"]
        lines += [name + b": " + value for name, value in headers]
        lines.append(b"content-length: %d" % len(body))
        with socket.create_connection(self.address, timeout=WAIT_S) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
                connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            reply = _read_all(connection)
        head, _, rest = reply.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
        return Reply(status, rest)

    def require_others_served(self) -> None:
        assert self.ask(BOB).status_code == 200, "another tenant is served"

    def log_lines(self) -> list[str]:
        return self.edge.child.log.read_text(errors="replace").splitlines()

    def require_clean_log(self) -> None:
        """No key, token, secret or prompt, and nothing that we got wrong ourselves."""
        hidden = [*secrets_in(self.system.keyring.path), self.issuer.secret.decode()]
        for line in self.log_lines():
            for secret in hidden:
                assert secret not in line, f"a secret stands in the log: {line[:400]}"
            assert not _JWT.search(line), f"a token stands in the log: {line[:400]}"
            assert "by our own fault" not in line, line[:2000]
            assert "Traceback" not in line, line[:2000]


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65_536):
            data += chunk
    return data


@contextmanager
def open_doors(folder: Path, workers: int = 1, **config: Any) -> Iterator[Doors]:
    """One edge at log level debug, whose fake workers step every millisecond."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(fake_worker("--step-ms", "1"))[0] for _ in range(workers)]
        system = stack.enter_context(System(folder, make_text_folder(folder / "text")))
        add_callers(system.keyring.path)
        issuer = JwtIssuer.create(folder)
        given: dict[str, Any] = {
            "context_servers": addresses,
            "generation_servers": addresses,
            "auth": issuer.settings,
            "listen": {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "log": {"level": "debug"},
        }
        edge = system.start_edge("edge", [], [], **(given | config))
        system.wait_ready(edge)
        yield Doors(edge, system, issuer)
