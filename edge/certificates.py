"""The certificates of one edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from configuration.tls import ClientMaterial, Kept, ServerMaterial, client_material, server_material
from edge.settings import EdgeSettings


@dataclass(frozen=True, slots=True)
class Certificates:
    """Of the listeners of callers, of the admin listener, and for dialling workers; None: without TLS."""

    callers: Kept[ServerMaterial] | None
    admin: Kept[ServerMaterial] | None
    workers: Kept[ClientMaterial] | None

    @classmethod
    def read(cls, settings: EdgeSettings) -> Self:
        """Raises SettingsError."""
        listen, workers = settings.listen, settings.worker_tls
        return cls(
            None if listen.tls is None else server_material(listen.tls, "listen.tls"),
            None if listen.admin.tls is None else server_material(listen.admin.tls, "listen.admin.tls"),
            None if workers is None else client_material(workers, "worker_tls"),
        )

    @property
    def all(self) -> list[Kept[ServerMaterial] | Kept[ClientMaterial]]:
        return [one for one in (self.callers, self.admin, self.workers) if one is not None]
