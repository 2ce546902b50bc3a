"""The envelope keys that this worker shares with its edges, read again while it runs."""

from __future__ import annotations

import base64
import binascii
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from configuration.reading import SettingsError
from enginelink.envelope import Key

REREAD_S = 1.0
Stamp = tuple[int, int, int] | None

log = structlog.get_logger()


class _EnvelopeKey(msgspec.Struct, frozen=True):
    id: str
    secret: str
    sign_from: float = 0.0
    retire_at: float | None = None


class _KeysFile(msgspec.Struct, frozen=True):
    envelope_keys: tuple[_EnvelopeKey, ...] = ()


def read_keys(file: Path) -> list[Key]:
    """The envelope keys in `file`. Raises SettingsError, naming it."""
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_KeysFile)
        return [
            Key(key.id, base64.b64decode(key.secret, validate=True), key.sign_from, key.retire_at)
            for key in content.envelope_keys
        ]
    except OSError as error:
        raise SettingsError(f"keys_file is {str(file)!r}, which cannot be read: {error.strerror}.") from error
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise SettingsError(f"keys_file is {str(file)!r}, which holds no envelope keys: {error}.") from error


def warnings_of(file: Path) -> list[str]:
    """What an operator should know of `file`, in which keys were found."""
    found = []
    if stat.S_IMODE(file.stat().st_mode) & 0o027:
        found.append(
            f"keys_file is {str(file)!r}, which everybody can read, or a group write: whoever has its keys may be an "
            "edge"
        )
    others = sorted(set(msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])) - {"envelope_keys"})
    if others:
        found.append(
            f"keys_file is {str(file)!r}, which holds {', '.join(others)} too: no worker needs them, and whoever "
            "takes it over has them; give it what `kinroute keys export-worker` writes"
        )
    return found


class WorkerKeys:
    """The keys of `file`; none without one. Raises SettingsError where it cannot be used at the start.

    `current` looks at most every `reread_s` whether the file was replaced or written to, so that a new key is known,
    and a retired one unknown, without a restart.
    """

    def __init__(self, file: Path | None, reread_s: float = REREAD_S) -> None:
        self._file = file
        self._reread_s = reread_s
        self._stamp = _stamp_of(file)
        self._keys: Sequence[Key] = () if file is None else read_keys(file)
        for warning in () if file is None else warnings_of(file):
            log.warning(warning)
        self._looked_s = time.monotonic()

    @property
    def is_configured(self) -> bool:
        return self._file is not None

    def current(self) -> Sequence[Key]:
        """The same object until the file changes."""
        now_s = time.monotonic()
        if self._file is not None and now_s - self._looked_s >= self._reread_s:
            self._looked_s = now_s
            stamp = _stamp_of(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read(self._file)
        return self._keys

    def _read(self, file: Path) -> None:
        try:
            self._keys = read_keys(file)
        except SettingsError as error:
            log.warning("the keys stay as they were", why=str(error))


def _stamp_of(file: Path | None) -> Stamp:
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
