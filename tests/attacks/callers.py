"""Who attacks and who is attacked: keys of two tenants in a key file, and everything secret about them."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

ISSUER = "https://issuer.test"
PROMPT = "the-prompt-that-nobody-may-log"
MARK = "kr-attack-"
"""What every API key here begins with, right or wrong."""


@dataclass(frozen=True)
class Caller:
    """One API key."""

    tenant: str
    subject: str
    scopes: tuple[str, ...] = ("affinity",)

    @property
    def key(self) -> str:
        return f"{MARK}{self.tenant}-{self.subject}-{'-'.join(self.scopes)}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return list(self.headers.items())


ANN = Caller("acme", "ann")
BOB = Caller("acme", "bob")
EVE = Caller("evil", "eve")
PLAIN = Caller("evil", "plain", ())
OPERATOR = Caller("ops", "olga", ("affinity", "operator"))
CALLERS = (ANN, BOB, EVE, PLAIN, OPERATOR)


def add_callers(key_file: Path, callers: Iterable[Caller] = CALLERS) -> None:
    """Their keys into a key file, hashed."""
    content = json.loads(key_file.read_text())
    for caller in callers:
        digest = hashlib.sha256(caller.key.encode()).hexdigest()
        content["api_keys"].append(
            {
                "id": f"{caller.tenant}-{caller.subject}",
                "sha256": digest,
                "tenant": caller.tenant,
                "subject": caller.subject,
                "scopes": caller.scopes,
            }
        )
    key_file.write_text(json.dumps(content))


def secrets_in(key_file: Path) -> list[str]:
    """What must stand in no log line, of a key file and of its callers."""
    content = json.loads(key_file.read_text())
    found = [content["id_key"], content["local_key"], MARK, PROMPT]
    for kind in ("envelope_keys", "lineage_keys"):
        for key in content[kind]:
            found += [key["secret"], base64.b64decode(key["secret"]).hex()]
    return found


@dataclass(frozen=True)
class JwtIssuer:
    """Signs tokens under a shared secret, which stands in `secret_file`."""

    secret_file: Path
    secret: bytes

    @classmethod
    def create(cls, folder: Path) -> JwtIssuer:
        secret = secrets.token_hex(32)
        file = folder / "jwt-secret"
        file.write_text(secret)
        file.chmod(0o600)
        return cls(file, secret.encode())

    @property
    def settings(self) -> dict[str, Any]:
        """What an edge's `auth` says of it."""
        return {"jwt": {"secret_file": str(self.secret_file), "algorithms": ["HS256"], "issuer": ISSUER}}

    def sign(self, claims: dict[str, Any]) -> str:
        """Whatever they are: no library looks at them first."""
        return jwt.PyJWS().encode(json.dumps(claims).encode(), self.secret, "HS256", {"typ": "JWT"})
