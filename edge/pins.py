"""Pages that wait on context workers for callers who drive both phases themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge.core.types import ConversationKey, FinishReason
from edge.legs import Connection

MAX_PINS = 1024
"""Of one tenant; its oldest ends where there would be more."""


@dataclass(slots=True)
class Pin:
    """One finished prefill. `key`: its worker's instance id and the session id. `until_s`: on the event loop's clock.
    Its conversation counts as answering elsewhere until `ended` is called."""

    key: tuple[str, str]
    tenant: str
    connection: Connection
    handle: int
    conversation: ConversationKey
    final: bool
    until_s: float

    def release(self) -> None:
        """Nobody needs the pages any more. Does nothing to those that were fetched."""
        self.connection.cancel(self.handle)

    def ended(self, reason: FinishReason | None) -> None:
        self.connection.ended(self.conversation, reason, final=self.final and reason is not None)


class Pins:
    """Those whose pages nobody fetches just now."""

    def __init__(self) -> None:
        self._pins: dict[tuple[str, str], Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, pin: Pin) -> None:
        own = [key for key, other in self._pins.items() if other.tenant == pin.tenant]
        if len(own) >= MAX_PINS:
            self._end(own[0])
        self._pins[pin.key] = pin

    def take(self, key: tuple[str, str]) -> Pin | None:
        """For whoever fetches the pages, and ends the pin or adds it again; None where this edge does not know it."""
        return self._pins.pop(key, None)

    def abort(self, key: tuple[str, str]) -> bool:
        """False: it is not here, or being fetched."""
        if key not in self._pins:
            return False
        self._end(key)
        return True

    def abort_all(self, tenant: str | None) -> int:
        """Of a tenant, or of everybody; returns how many."""
        return self._end_where(lambda pin: tenant in (None, pin.tenant))

    def expire(self, now_s: float) -> None:
        self._end_where(lambda pin: pin.until_s <= now_s)

    def _end_where(self, is_so: Callable[[Pin], bool]) -> int:
        found = [key for key, pin in self._pins.items() if is_so(pin)]
        for key in found:
            self._end(key)
        return len(found)

    def _end(self, key: tuple[str, str]) -> None:
        pin = self._pins.pop(key)
        pin.release()
        pin.ended(None)
