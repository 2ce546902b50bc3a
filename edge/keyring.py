"""The edge's secrets: one JSON file, mode 0600, made at the first start.

    {"version": 1, "id_key": BASE64, "local_key": "kr-…",
     "api_keys": [{"id", "sha256", "tenant", "subject", "scopes", "created", "expires", "limits"}],
     "envelope_keys": [{"id", "secret": BASE64, "sign_from": UNIX_SECONDS, "retire_at": UNIX_SECONDS}],
     "lineage_keys": [as envelope_keys]}

`lineage_keys` sign what only edges verify: lineage tokens and the seals of handoff references. `id_key` keys the hashes
of ids and the cache salts. Replicas must share all of it. `local_key` is the API key that `kinroute up` prints; all
others are stored as hashes only. Workers get a file with the envelope keys alone. Who changes the file holds the lock
file beside it, `.NAME.lock`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from configuration.locks import held
from edge.core.types import Principal, Scope, TenantLimits
from enginelink.envelope import Key

KEY_PREFIX = "kr-"
VERSION = 1
ID_KEY_BYTES = 32


class KeyringError(Exception):
    """Raised when a key file cannot be used; one sentence that says what to do."""


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """`created`, `expires`: Unix seconds."""

    id: str
    sha256: str
    tenant: str = "default"
    subject: str = "default"
    scopes: tuple[str, ...] = ()
    created: float = 0.0
    expires: float | None = None
    limits: TenantLimits = TenantLimits()

    @property
    def principal(self) -> Principal:
        return Principal(self.tenant, self.subject, frozenset(self.scopes), self.id, self.limits)


class SigningKey(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    secret: str
    sign_from: float = 0.0
    retire_at: float | None = None

    @property
    def key(self) -> Key:
        return Key(self.id, base64.b64decode(self.secret, validate=True), self.sign_from, self.retire_at)


class KeyFile(msgspec.Struct, frozen=True):
    """What the file holds."""

    version: int
    id_key: str
    api_keys: tuple[ApiKey, ...]
    envelope_keys: tuple[SigningKey, ...]
    lineage_keys: tuple[SigningKey, ...] = ()
    local_key: str = ""


class Keyring:
    """A key file's content. `open` makes it where it is missing; `load` does not; `change` is how it changes."""

    def __init__(self, path: Path, content: KeyFile) -> None:
        self.path = path
        self.content = content

    @classmethod
    def open(cls, path: Path, *, new_key: bool = False) -> Self:
        """Load `path`, or make it; its local key, of scope `affinity`, is made where it is missing or `new_key` asks.

        Raises KeyringError.
        """
        if not path.exists():
            # Whoever makes the file first has made it for all.
            _write_private(path, _encode(_with_local_key(_new_content())), replace=False)
        keyring = cls.load(path)
        return cls.change(path, _with_local_key) if new_key or not keyring.local_key else keyring

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make `path` with signing keys and no API key. Raises KeyringError where it is there."""
        with _alone(path):
            if path.exists():
                raise KeyringError(f"The key file {path} is there already: nothing was changed.")
            _write_private(path, _encode(_new_content()))
        return cls.load(path)

    @classmethod
    def change(cls, path: Path, change: Callable[[KeyFile], KeyFile]) -> Self:
        """Load `path` and write what `change` makes of it, while no other process does. Raises KeyringError."""
        with _alone(path):
            content = change(cls.load(path).content)
            _write_private(path, _encode(content))
        return cls(path, content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises KeyringError: unreadable, readable by others, or of another form."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read()
        except FileNotFoundError as error:
            message = f"There is no key file {path}: `kinroute keys init` makes it, or the first `kinroute up` its own."
            raise KeyringError(message) from error
        except OSError as error:
            raise KeyringError(f"The key file {path} cannot be read: {error.strerror}.") from error
        # A group may read: that is how a mounted secret reaches a program that is not root.
        if stat.S_IMODE(mode) & 0o027:
            raise KeyringError(
                f"The key file {path} can be read by everybody, or written by a group: run chmod 600 {path}, and "
                "replace its keys."
            )
        try:
            content = msgspec.json.decode(data, type=KeyFile)
        except msgspec.MsgspecError as error:
            raise KeyringError(
                f"The key file {path} is damaged ({error}): restore it, or move it away to have new keys made."
            ) from error
        if content.version != VERSION:
            raise KeyringError(f"The key file {path} has version {content.version}; this release reads {VERSION}.")
        keyring = cls(path, content)
        try:
            id_key, _ = keyring.id_key, (keyring.envelope_keys, keyring.lineage_keys)
        except (binascii.Error, ValueError) as error:
            raise KeyringError(f"The key file {path} holds a key that cannot be used: {error}.") from error
        if len(id_key) < ID_KEY_BYTES:
            raise KeyringError(f"The key file {path} has an id_key of {len(id_key)} bytes: at least {ID_KEY_BYTES}.")
        return keyring

    @property
    def local_key(self) -> str:
        return self.content.local_key

    @property
    def id_key(self) -> bytes:
        return base64.b64decode(self.content.id_key, validate=True)

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        return self.content.api_keys

    @property
    def principals(self) -> dict[str, Principal]:
        """Of the API keys, by the SHA-256 of each."""
        return {key.sha256: key.principal for key in self.api_keys}

    @property
    def ends_s(self) -> dict[str, float]:
        """When API keys end that do, by their SHA-256."""
        return {key.sha256: key.expires for key in self.api_keys if key.expires is not None}

    @property
    def envelope_keys(self) -> tuple[Key, ...]:
        return tuple(stored.key for stored in self.content.envelope_keys)

    @property
    def lineage_keys(self) -> tuple[Key, ...]:
        return tuple(stored.key for stored in self.content.lineage_keys)

    def write_worker_keys(self, path: Path) -> None:
        """What workers may hold: the envelope keys, as JSON, mode 0600."""
        _write_private(path, msgspec.json.encode({"envelope_keys": self.content.envelope_keys}))


def _encode(content: KeyFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content))


def new_api_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(24)


def digest_of(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()


def new_id() -> str:
    return secrets.token_hex(4)


def new_signing_key(sign_from_s: int) -> SigningKey:
    """Whole seconds, as those of what is signed."""
    return SigningKey(new_id(), _random_base64(), sign_from_s)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(path.with_name(f".{path.name}.lock"), wait=True):
        yield


def _new_content() -> KeyFile:
    now_s = int(time.time())
    return KeyFile(VERSION, _random_base64(), (), (new_signing_key(now_s),), (new_signing_key(now_s),))


def _with_local_key(content: KeyFile) -> KeyFile:
    """Another local key than before, for the same subject."""
    local = new_api_key()
    old = digest_of(content.local_key)
    others = tuple(key for key in content.api_keys if key.sha256 != old)
    made = ApiKey(new_id(), digest_of(local), "default", "local", (Scope.AFFINITY.value,), time.time())
    return msgspec.structs.replace(content, local_key=local, api_keys=(*others, made))


def _random_base64() -> str:
    return base64.b64encode(secrets.token_bytes(ID_KEY_BYTES)).decode()


def _write_private(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Whole or not at all: others see the old file until the new one is complete; without `replace` it stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
