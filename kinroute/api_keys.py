"""`kinroute key`: API keys of callers. A key is shown once, when it is made; its hash alone is kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from edge.core.claims import LIMIT_NAMES
from edge.core.types import Scope, TenantLimits
from edge.keyring import ApiKey, KeyFile, Keyring, KeyringError, digest_of, new_api_key, new_id
from kinroute.durations import at
from kinroute.problem import Problem


def create(
    file: Path,
    *,
    tenant: str,
    subject: str,
    scopes: list[str],
    limits: TenantLimits,
    life_s: float | None,
    as_json: bool,
) -> int:
    """Make a key and print it. Raises Problem."""
    now_s = time.time()
    secret = new_api_key()
    expires = None if life_s is None else now_s + life_s
    made = ApiKey(new_id(), digest_of(secret), tenant, subject, tuple(sorted(set(scopes))), now_s, expires, limits)

    def change(content: KeyFile) -> KeyFile:
        return msgspec.structs.replace(content, api_keys=(*_alive(content, now_s), made))

    _changed(file, change)
    _show_new(made, secret, as_json=as_json)
    return 0


def rotate(file: Path, key_id: str, *, grace_s: float, as_json: bool) -> int:
    """Print a new key for the same principal; the old one ends after `grace_s`. Raises Problem."""
    now_s = time.time()
    secret = new_api_key()
    made: list[ApiKey] = []

    def change(content: KeyFile) -> KeyFile:
        old = _find(content, key_id)
        made.append(msgspec.structs.replace(old, id=new_id(), sha256=digest_of(secret), created=now_s))
        end_s = now_s + grace_s if old.expires is None else min(old.expires, now_s + grace_s)
        ending = () if grace_s <= 0 else (msgspec.structs.replace(old, expires=end_s),)
        others = (key for key in _alive(content, now_s) if key.id != key_id)
        local_key = secret if _is_local(content, old) else content.local_key
        return msgspec.structs.replace(content, api_keys=(*others, *ending, *made), local_key=local_key)

    _changed(file, change)
    _show_new(made[0], secret, as_json=as_json)
    return 0


def revoke(file: Path, key_id: str) -> int:
    """The key stops working on every edge that reads this file, within seconds. Raises Problem."""
    now_s = time.time()

    def change(content: KeyFile) -> KeyFile:
        gone = _find(content, key_id)
        others = tuple(key for key in _alive(content, now_s) if key.id != key_id)
        local_key = "" if _is_local(content, gone) else content.local_key
        return msgspec.structs.replace(content, api_keys=others, local_key=local_key)

    _changed(file, change)
    sys.stdout.write(f"Key {key_id} is revoked.\n")
    return 0


def show(file: Path, *, as_json: bool) -> int:
    """Print every key's id and principal. Raises Problem."""
    try:
        keys = Keyring.load(file).api_keys
    except KeyringError as error:
        raise Problem(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps([_members(key) for key in keys], indent=2) + "\n")
        return 0
    now_s = time.time()
    for key in keys:
        lines = [f"{key.id}  tenant {key.tenant}, subject {key.subject}, scopes {', '.join(key.scopes) or 'none'}"]
        if key.created:
            lines.append(f"created {at(key.created, now_s)}")
        if key.expires is not None:
            lines.append(f"{'expires' if key.expires > now_s else 'expired'} {at(key.expires, now_s)}")
        limits = _stated(key.limits)
        if limits:
            lines.append(f"limits {', '.join(f'{name}={limit}' for name, limit in limits.items())}")
        sys.stdout.write("\n          ".join(lines) + "\n")
    return 0


def scope(text: str) -> str:
    """A scope that there is, for argparse."""
    if text not in set(Scope):
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(Scope)}, not {text!r}")
    return text


def name(text: str) -> str:
    """A tenant's or a subject's, for argparse."""
    if not text or not text.isprintable() or len(text.encode(errors="surrogatepass")) > 256:
        raise argparse.ArgumentTypeError("must be 1 to 256 bytes of printable text")
    return text


def tenant_limits(text: str) -> TenantLimits:
    """`requests=8,children=4`, for argparse."""
    limits: dict[str, int] = {}
    for part in text.split(","):
        key, _, number = part.partition("=")
        if key not in LIMIT_NAMES or key in limits or not number.isascii() or not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(
                f"must be NAME=NUMBER,… with names of {', '.join(LIMIT_NAMES)} and numbers from 1 on, not {part!r}"
            )
        limits[key] = int(number)
    return TenantLimits(**limits)


def _changed(file: Path, change: Any) -> None:
    try:
        Keyring.change(file, change)
    except KeyringError as error:
        raise Problem(str(error)) from error


def _find(content: KeyFile, key_id: str) -> ApiKey:
    for key in content.api_keys:
        if key.id == key_id:
            return key
    raise Problem(f"There is no key with the id {key_id}: `kinroute key list` shows them.")


def _alive(content: KeyFile, now_s: float) -> tuple[ApiKey, ...]:
    """What has expired is dropped whenever the file is written."""
    return tuple(key for key in content.api_keys if key.expires is None or now_s < key.expires)


def _is_local(content: KeyFile, key: ApiKey) -> bool:
    """Whether it is the one that `kinroute up` prints."""
    return bool(content.local_key) and digest_of(content.local_key) == key.sha256


def _show_new(key: ApiKey, secret: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"key": secret, **_members(key)}, indent=2) + "\n")
        return
    sys.stderr.write(f"Key {key.id}, of {key.subject} in {key.tenant}. It is shown this once:\n")
    sys.stdout.write(f"{secret}\n")


def _members(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "subject": key.subject,
        "scopes": list(key.scopes),
        "created": key.created,
        "expires": key.expires,
        "limits": _stated(key.limits),
    }


def _stated(limits: TenantLimits) -> Mapping[str, int]:
    return {name: limit for name in LIMIT_NAMES if (limit := getattr(limits, name)) is not None}
