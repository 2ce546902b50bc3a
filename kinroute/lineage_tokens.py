"""`kinroute token lineage`: tokens that prove a parent, made and looked into with an edge's own keys."""

from __future__ import annotations

import base64
import binascii
import json
import sys
import time
from pathlib import Path

from edge.core.lineage_token import MAX_LIFE_S, LineageTokenError, LineageTokens
from edge.core.namespace import Namespace
from edge.core.types import FamilyKey, Lineage, Principal
from edge.keyring import Keyring, KeyringError
from kinroute.durations import at
from kinroute.problem import Problem


def mint(file: Path, *, tenant: str, subject: str, conversation: str, depth: int, life_s: float) -> int:
    """Print the token of a conversation that `subject` names so. Raises Problem."""
    keyring = _load(file)
    key = Namespace(keyring.id_key).conversation(Principal(tenant, subject, frozenset()), conversation)
    if life_s > MAX_LIFE_S:
        raise Problem(f"A lineage token lives for at most {MAX_LIFE_S} s.")
    token = LineageTokens(keyring.lineage_keys, int(life_s)).issue(
        tenant, Lineage(key, FamilyKey(key), depth=depth), time.time()
    )
    if not token:
        raise Problem("No lineage key signs now: `kinroute keys list` says from when on.")
    sys.stdout.write(f"{token}\n")
    return 0


def inspect(token: str, file: Path, *, tenant: str | None) -> int:
    """Print what a token states, and whether an edge with this key file would believe it, from `tenant` or its own.
    Returns 1 where it would not. Raises Problem."""
    now_s = time.time()
    try:
        header, claims = (json.loads(_decoded(part)) for part in token.split(".")[:2])
        if not isinstance(header, dict) or not isinstance(claims, dict):
            raise Problem("This is no token.")
    except (ValueError, binascii.Error, RecursionError) as error:
        raise Problem("This is no token.") from error
    sys.stdout.write(f"header {json.dumps(header, indent=2)}\nclaims {json.dumps(claims, indent=2)}\n")
    for name in ("iat", "exp"):
        if isinstance(claims.get(name), int):
            sys.stdout.write(f"{name} {at(claims[name], now_s)}\n")
    sender = tenant if tenant is not None else str(claims.get("tenant", ""))
    try:
        stated = LineageTokens(_load(file).lineage_keys).verify(token, sender, now_s)
    except LineageTokenError as error:
        sys.stdout.write(f"refused: {error.reason}\n")
        return 1
    sys.stdout.write(f"believed from tenant {sender}: a child of {stated.conversation}\n")
    return 0


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _load(file: Path) -> Keyring:
    try:
        return Keyring.load(file)
    except KeyringError as error:
        raise Problem(str(error)) from error
