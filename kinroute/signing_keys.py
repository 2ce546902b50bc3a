"""`kinroute keys`: the keys that edges sign envelopes and lineage tokens with."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import msgspec

from edge.core.lineage_token import LEEWAY_S as TOKEN_LEEWAY_S
from edge.core.lineage_token import MAX_LIFE_S
from edge.keyring import KeyFile, Keyring, KeyringError, SigningKey, new_signing_key
from enginelink.compact_jwt import signing_key
from enginelink.envelope import LEEWAY_S, LIFE_S
from kinroute.durations import at
from kinroute.problem import Problem

SIGN_FROM_IN_S = 300.0
MARGIN_S = 60.0
"""For clocks that differ, and edges that read the file late."""
READ_S = 10.0
"""By then every edge has read a file that changed."""


def init(file: Path) -> int:
    """Make a key file without API keys. Raises Problem where there is one."""
    try:
        Keyring.create(file)
    except KeyringError as error:
        raise Problem(str(error)) from error
    sys.stdout.write(f"{file} is made: every edge needs the same one. `kinroute key create` adds API keys.\n")
    return 0


def rotate(file: Path, *, sign_from_in_s: float, worker_file: Path | None) -> int:
    """Add a key of each kind, and let the old ones retire once nothing that they signed is alive. Raises Problem."""
    now_s = time.time()

    def change(content: KeyFile) -> KeyFile:
        return msgspec.structs.replace(
            content,
            envelope_keys=rotated(content.envelope_keys, now_s, sign_from_in_s, LIFE_S + LEEWAY_S),
            lineage_keys=rotated(content.lineage_keys, now_s, sign_from_in_s, MAX_LIFE_S + TOKEN_LEEWAY_S),
        )

    try:
        keyring = Keyring.change(file, change)
    except KeyringError as error:
        raise Problem(str(error)) from error
    if worker_file is not None:
        _export(keyring, worker_file)
    sys.stdout.write(_listing(keyring, now_s))
    return 0


def rotated(keys: tuple[SigningKey, ...], now_s: float, sign_from_in_s: float, life_s: float) -> tuple[SigningKey, ...]:
    """With a new key. `life_s`: how long what was signed is believed, leeway included.

    Who is retired is dropped, and who would begin after the new key: it signed nothing, and is not to sign beyond its
    end.
    """
    alive = [key for key in keys if key.retire_at is None or now_s < key.retire_at]
    # An edge that has not read the file again may yet begin with these.
    begun_s = [key.sign_from for key in alive if key.sign_from <= now_s + READ_S]
    sign_from_s = max(math.ceil(now_s + sign_from_in_s), math.floor(max(begun_s, default=0.0)) + 1)
    retire_s = sign_from_s + life_s + MARGIN_S
    kept = [
        msgspec.structs.replace(key, retire_at=retire_s if key.retire_at is None else min(key.retire_at, retire_s))
        for key in alive
        if key.sign_from < sign_from_s
    ]
    return (*kept, new_signing_key(sign_from_s))


def show(file: Path, *, as_json: bool) -> int:
    """Print every signing key's id and times. Raises Problem."""
    keyring = _load(file)
    if as_json:
        shown = {
            kind: [{"id": key.id, "sign_from": key.sign_from, "retire_at": key.retire_at} for key in keys]
            for kind, keys in _kinds(keyring).items()
        }
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write(_listing(keyring, time.time()))
    return 0


def export_worker(file: Path, worker_file: Path) -> int:
    """Write the keys that workers may hold. Raises Problem."""
    _export(_load(file), worker_file)
    return 0


def _load(file: Path) -> Keyring:
    try:
        return Keyring.load(file)
    except KeyringError as error:
        raise Problem(str(error)) from error


def _export(keyring: Keyring, worker_file: Path) -> None:
    try:
        keyring.write_worker_keys(worker_file)
    except OSError as error:
        raise Problem(f"The worker's key file {worker_file} cannot be written: {error.strerror}.") from error


def _kinds(keyring: Keyring) -> dict[str, tuple[SigningKey, ...]]:
    return {"envelope_keys": keyring.content.envelope_keys, "lineage_keys": keyring.content.lineage_keys}


def _listing(keyring: Keyring, now_s: float) -> str:
    lines = []
    for kind, keys in _kinds(keyring).items():
        signs = signing_key([key.key for key in keys], now_s)
        for key in keys:
            if key.retire_at is not None and now_s >= key.retire_at:
                state = f"retired {at(key.retire_at, now_s)}"
            elif signs is not None and signs.key_id == key.id:
                state = "signs" + ("" if key.retire_at is None else f", retires {at(key.retire_at, now_s)}")
            elif key.sign_from > now_s:
                state = f"signs from {at(key.sign_from, now_s)}"
            else:
                state = "is verified with" + ("" if key.retire_at is None else f", retires {at(key.retire_at, now_s)}")
            lines.append(f"{kind.removesuffix('_keys'):9} {key.id}  {state}\n")
    return "".join(lines)
