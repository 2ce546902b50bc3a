"""An issuer of tokens: keys of every kind, tokens that PyJWT makes, and a real server that publishes a JWKS."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SECRET = b"s" * 64
ISSUER, AUDIENCE = "https://issuer.test", "kinroute"
FAMILIES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed448")
"""Algorithms by the name under which `private_key` knows them; `Ed448` is EdDSA on the other curve."""


def private_key(kind: str, number: int = 0) -> Any:
    """The same key for the same arguments; RSA keys are one for all algorithms of RSA."""
    return _private_key("RSA" if kind.startswith(("RS", "PS")) else kind, number)


@cache
def _private_key(kind: str, number: int) -> Any:
    match kind:
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "ES384":
            return ec.generate_private_key(ec.SECP384R1())
        case "ES512":
            return ec.generate_private_key(ec.SECP521R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
        case "Ed448":
            return ed448.Ed448PrivateKey.generate()
        case "weak":
            return rsa.generate_private_key(65537, 1024)  # noqa: S505 - what must be refused
    return rsa.generate_private_key(65537, 2048)


def algorithm_of(kind: str) -> str:
    return {"Ed448": "EdDSA", "weak": "RS256"}.get(kind, kind)


def pem(kind: str, number: int = 0) -> bytes:
    public: bytes = private_key(kind, number).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return public


def jwk(kind: str, kid: str | None = None, number: int = 0, **more: object) -> dict[str, object]:
    """The public key of `private_key`, or for HS256 the secret."""
    if kind.startswith("HS"):
        members: dict[str, object] = {"kty": "oct", "k": base64.urlsafe_b64encode(SECRET).decode().rstrip("=")}
    else:
        algorithm = jwt.get_algorithm_by_name(algorithm_of(kind))
        members = dict(algorithm.to_jwk(private_key(kind, number).public_key(), as_dict=True))
        members.pop("key_ops", None)
    return members | ({} if kid is None else {"kid": kid}) | more


def jwks(*keys: Mapping[str, object]) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def token(
    kind: str = "RS256",
    *,
    kid: str | None = None,
    number: int = 0,
    headers: Mapping[str, object] | None = None,
    **claims: object,
) -> str:
    """Of ann of acme, with the scope affinity, for ten minutes; a claim that is None is left out."""
    given: dict[str, object] = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ann",
        "tenant": "acme",
        "scope": "affinity",
        "exp": time.time() + 600,
    }
    stated = {name: value for name, value in (given | claims).items() if value is not None}
    key = SECRET if kind.startswith("HS") else private_key(kind, number)
    more = dict(headers or {}) | ({} if kid is None else {"kid": kid})
    return jwt.encode(stated, key, algorithm_of(kind), headers=more)


def raw_token(header: Mapping[str, object], claims: Mapping[str, object], signature: bytes = b"") -> str:
    """As it is written, whatever it says."""
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


@dataclass
class Answer:
    """`wait`: it begins only once this is set, or the server ends."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None


@dataclass
class Issuer:
    """`asked`: the path of every request that came; `answer` says what comes back."""

    url: str
    answer: Callable[[str], Answer]
    asked: list[str] = field(default_factory=list)

    def publish(self, *keys: Mapping[str, object]) -> None:
        body = jwks(*keys)
        self.answer = lambda path: Answer(body)

    def fail(self, status: int = 503) -> None:
        self.answer = lambda path: Answer(status=status)

    def wait_asked(self, count: int) -> None:
        end_s = time.monotonic() + 20.0
        while len(self.asked) < count:
            assert time.monotonic() < end_s, f"asked {len(self.asked)} times"
            time.sleep(0.01)


@contextmanager
def issuer(*keys: Mapping[str, object], certificate: Path | None = None, key: Path | None = None) -> Iterator[Issuer]:
    """A server on loopback that publishes `keys`; over TLS with `certificate` and its `key`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            answer = served.answer(self.path)
            while answer.wait is not None and not answer.wait.wait(0.02):
                if ended.is_set():
                    return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None and key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    served = Issuer(f"{scheme}://127.0.0.1:{server.server_address[1]}/keys", lambda path: Answer())
    served.publish(*keys)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        yield served
    finally:
        ended.set()
        server.shutdown()
        thread.join(20.0)
        server.server_close()
