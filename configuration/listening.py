"""Who may be reached without TLS: what every part asks of its listeners before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from configuration.addresses import AddressText, is_loopback, split_address
from configuration.reading import Section, SettingsError
from configuration.tls import ServerTls


class AdminListen(Section):
    """Where probes, metrics and control calls are served; `admin: ADDRESS` is short for `admin: {address: ADDRESS}`.

    An address that is not loopback is refused without `tls` or `allow_plaintext`; there, control calls are for
    operators alone. `tls.client_ca_file`: whoever presents a certificate of it is an operator; probes and metrics need
    none.
    """

    address: AddressText
    allow_plaintext: bool = False
    tls: ServerTls | None = None

    @property
    def listener(self) -> Listener:
        carries = "metrics, keys and control calls"
        host, _ = split_address(self.address)
        return Listener("listen.admin", self.address, host, "listen.admin", self.tls, self.allow_plaintext, carries)


def _as_section(value: Any) -> Any:
    return {"address": value} if isinstance(value, str) else value


AdminSetting = Annotated[AdminListen, BeforeValidator(_as_section, json_schema_input_type=AddressText | AdminListen)]


@dataclass(frozen=True, slots=True)
class Listener:
    """One address that a part listens on. `key`: of the address; `section`: of its `tls` and `allow_plaintext`.
    `carries`: what others could read or change, where it is neither loopback nor encrypted."""

    key: str
    address: str
    host: str
    section: str
    tls: ServerTls | None
    allow_plaintext: bool
    carries: str

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def is_exposed(self) -> bool:
        """Others than this machine's users can reach it, in the clear."""
        return self.tls is None and not self.is_loopback

    def require_protection(self) -> None:
        """Raises SettingsError where it is exposed, and nobody has said that it may be."""
        if self.is_exposed and not self.allow_plaintext:
            raise SettingsError(
                f"{self.key} is {self.address!r}, not a loopback address: {self.carries} would travel unencrypted; set "
                f"{self.section}.tls, or {self.section}.allow_plaintext: true if something else protects that network."
            )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know of it."""
        if not self.is_exposed:
            return ()
        return (f"{self.key} is {self.address!r}, without TLS: {self.carries} travel unencrypted",)
