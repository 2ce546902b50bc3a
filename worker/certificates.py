"""The certificates of one rank's transfer port and of what it dials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from configuration.tls import ClientMaterial, Kept, ServerMaterial, client_material, server_material
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class TransferCertificates:
    """None: without TLS."""

    server: Kept[ServerMaterial] | None
    client: Kept[ClientMaterial] | None

    @classmethod
    def read(cls, settings: WorkerSettings) -> Self:
        """Raises SettingsError."""
        own, others = settings.listen.tls, settings.pull_tls
        return cls(
            None if own is None else server_material(own, "listen.tls"),
            None if others is None else client_material(others, "kv_transfer.tls"),
        )

    @property
    def all(self) -> list[Kept[ServerMaterial] | Kept[ClientMaterial]]:
        return [one for one in (self.server, self.client) if one is not None]


def require_certificates(settings: WorkerSettings) -> None:
    """Raises SettingsError where one of the files that the settings name cannot be used."""
    TransferCertificates.read(settings)
    if settings.listen.admin.tls is not None:
        server_material(settings.listen.admin.tls, "listen.admin.tls")
