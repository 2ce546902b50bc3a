"""TLS as settings name it, and what its files hold: read at the start, and again when they change."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import structlog

from configuration.reading import Section, SettingsError

LOOK_S = 1.0

log = structlog.get_logger()


class ServerTls(Section):
    """PEM files of a listener. `client_ca_file`: callers must present a certificate that it vouches for."""

    certificate_file: Path
    key_file: Path
    client_ca_file: Path | None = None


class ClientTls(Section):
    """PEM files for dialling others. `ca_file` vouches for their certificates; `certificate_file` and `key_file` are
    shown to those that ask. `server_name`: the name in their certificates, where it is not the host that is dialled."""

    ca_file: Path
    certificate_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class ServerMaterial:
    """A listener's certificates as PEM, and a context for them. `client_ca`: None where callers need no certificate."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class ClientMaterial:
    """What to trust and what to show, as PEM, and a context for it. `server_name`: to be found in the other's
    certificate, in place of the host."""

    ca: bytes
    certificate: bytes | None
    key: bytes | None
    server_name: str | None
    context: ssl.SSLContext


Material = TypeVar("Material")


class Kept(Generic[Material]):
    """`current` is what `read` made of `files` when they were last good. Any thread may use it; `Watch` keeps it."""

    def __init__(self, files: Sequence[Path], read: Callable[[], Material]) -> None:
        """Raises SettingsError."""
        self._files = files
        self._read = read
        self._used = self._seen = self._signature()
        self.current = read()

    def look(self) -> None:
        """Use files that have changed, once they have stayed the same for two looks: they are replaced one by one."""
        seen, before = self._signature(), self._seen
        self._seen = seen
        if seen == self._used or seen != before:
            return
        self._used = seen
        try:
            self.current = self._read()
        except SettingsError as error:
            log.warning("the certificates stay as they were", why=str(error))
        else:
            log.info("new certificates are used", files=[str(file) for file in self._files])

    def _signature(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_signature(file) for file in self._files)


class Watch:
    """Looks at all of `kept` once in `every_s`, on a thread of its own, until it is closed."""

    def __init__(self, kept: Sequence[Kept[ServerMaterial] | Kept[ClientMaterial]], every_s: float = LOOK_S) -> None:
        self._kept = kept
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)
        if kept:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            for one in self._kept:
                one.look()


def server_material(tls: ServerTls, key: str) -> Kept[ServerMaterial]:
    """`key`: of the section. Raises SettingsError, naming the key below it, the file and what is wrong."""
    files = [tls.certificate_file, tls.key_file]
    if tls.client_ca_file is not None:
        files.append(tls.client_ca_file)
    return Kept(files, lambda: _read_server(tls, key))


def client_material(tls: ClientTls, key: str) -> Kept[ClientMaterial]:
    """Like `server_material`."""
    files = [file for file in (tls.ca_file, tls.certificate_file, tls.key_file) if file is not None]
    return Kept(files, lambda: _read_client(tls, key))


def renewing_context(kept: Kept[ServerMaterial], *, certificate_optional: bool = False) -> ssl.SSLContext:
    """For a server that keeps one context: each new connection gets what is current when it begins.

    `certificate_optional`: callers that present no certificate get in; one that does not verify is refused still.
    """
    context = _server_context()
    material = kept.current
    if material.client_ca is not None:
        context.verify_mode = ssl.CERT_OPTIONAL if certificate_optional else ssl.CERT_REQUIRED
        # Who was let in by an authority that is not trusted any more must not come back on a ticket.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0

    def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        connection.context = kept.current.context

    context.sni_callback = renew
    return context


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_server(tls: ServerTls, key: str) -> ServerMaterial:
    certificate = _certificates(tls.certificate_file, f"{key}.certificate_file")
    own_key = _content(tls.key_file, f"{key}.key_file")
    context = _server_context()
    _load_chain(context, tls.certificate_file, tls.key_file, key)
    client_ca = None
    if tls.client_ca_file is not None:
        client_ca = _certificates(tls.client_ca_file, f"{key}.client_ca_file")
        context.load_verify_locations(cadata=client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0
    return ServerMaterial(certificate, own_key, client_ca, context)


def _read_client(tls: ClientTls, key: str) -> ClientMaterial:
    ca = _certificates(tls.ca_file, f"{key}.ca_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=ca.decode("ascii"))
    if (tls.certificate_file is None) != (tls.key_file is None):
        missing, other = (
            ("certificate_file", "key_file") if tls.certificate_file is None else ("key_file", "certificate_file")
        )
        raise SettingsError(f"{key}.{missing} is missing: {key}.{other} is set, and each needs the other.")
    certificate = own_key = None
    if tls.certificate_file is not None and tls.key_file is not None:
        certificate = _certificates(tls.certificate_file, f"{key}.certificate_file")
        own_key = _content(tls.key_file, f"{key}.key_file")
        _load_chain(context, tls.certificate_file, tls.key_file, key)
    return ClientMaterial(ca, certificate, own_key, tls.server_name, context)


class _Encrypted(Exception):
    """Raised when a key asks for a password."""


def _load_chain(context: ssl.SSLContext, certificate: Path, own_key: Path, key: str) -> None:
    """`certificate` is known to hold certificates, and `own_key` to be readable."""
    try:
        context.load_cert_chain(certificate, own_key, password=_refuse)
    except _Encrypted as error:
        raise SettingsError(
            f"{key}.key_file is {str(own_key)!r}: the key is encrypted, and there is nobody to ask for its password; "
            "give one that is not, in a file that only this process's user can read."
        ) from error
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise SettingsError(
                f"{key}.key_file is {str(own_key)!r}: it is not the key of the first certificate in "
                f"{key}.certificate_file, {str(certificate)!r}."
            ) from error
        raise SettingsError(
            f"{key}.key_file is {str(own_key)!r}: it cannot be used with {str(certificate)!r}; it must hold one PEM "
            "private key."
        ) from error


def _refuse() -> NoReturn:
    raise _Encrypted


def _certificates(file: Path, key: str) -> bytes:
    """The PEM text of a file that holds certificates."""
    content = _content(file, key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(f"{key} is {str(file)!r}: it holds no PEM certificate that can be read.") from error
    return content


def _content(file: Path, key: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{key} is {str(file)!r}: it cannot be read ({error.strerror}).") from error


def _signature(file: Path) -> tuple[int, ...]:
    """Another one once the file has changed, or what a link to it points to; empty while it is not there."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
