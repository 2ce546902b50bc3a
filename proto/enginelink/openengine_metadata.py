"""OpenEngine's metadata keys, read by the protocol's rules. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "openengine-"
MAX_ROUTING_KEY_BYTES = 256
INT32 = range(-(1 << 31), 1 << 31)
UINT32 = range(1 << 32)
_MAX_DIGITS = 11


class MetadataError(ValueError):
    """Raised when a key is repeated or malformed; the message names it."""


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """`routing_key`: empty where there is none. `target_dp_rank`: a wish. `priority`: counts where it is advertised."""

    routing_key: str = ""
    target_dp_rank: int | None = None
    priority: int = 0


def read_metadata(pairs: Iterable[tuple[str, str | bytes]]) -> RequestMetadata:
    """Keys under the prefix that the protocol does not know are ignored, but not twice. Raises MetadataError."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if key.startswith(PREFIX):
            if key in found:
                raise MetadataError(f"{key} is given twice")
            found[key] = value if isinstance(value, str) else value.decode(errors="replace")
    routing_key = found.get("openengine-routing-key")
    if routing_key == "":
        raise MetadataError("openengine-routing-key is empty")
    if routing_key is not None and len(routing_key.encode()) > MAX_ROUTING_KEY_BYTES:
        raise MetadataError(f"openengine-routing-key is longer than {MAX_ROUTING_KEY_BYTES} bytes")
    return RequestMetadata(
        routing_key or "",
        _integer(found, "openengine-target-dp-rank", UINT32),
        _integer(found, "openengine-priority", INT32) or 0,
    )


def _integer(found: dict[str, str], key: str, allowed: range) -> int | None:
    text = found.get(key)
    if text is None:
        return None
    digits = text.removeprefix("-") if allowed.start < 0 else text
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS
    if not is_number or int(text) not in allowed:
        raise MetadataError(f"{key} is {text[:40]!r}: a base-10 integer of {allowed.start} to {allowed.stop - 1}")
    return int(text)
