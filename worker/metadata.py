"""What gRPC metadata says of a request, by OpenEngine's rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.refusal import invalid, unsupported

PREFIX = "openengine-"
LINEAGE = "kinroute-lineage"
FOREIGN_HINT = "x-trtllm-subagent-affinity-"
INT32 = range(-(1 << 31), 1 << 31)
UINT32 = range(1 << 32)


@dataclass(frozen=True, slots=True)
class Metadata:
    target_dp_rank: int | None = None
    lineage: str = ""

    @classmethod
    def read(cls, pairs: Iterable[tuple[str, str | bytes]]) -> Metadata:
        """Raises Refused where an `openengine-` key is repeated or malformed."""
        found: dict[str, str] = {}
        for key, value in pairs:
            if key.startswith(FOREIGN_HINT):
                raise unsupported(f"{key}: this worker takes lineage in {LINEAGE} alone")
            if key.startswith(PREFIX) or key == LINEAGE:
                if key in found:
                    raise invalid(f"{key} is given twice")
                found[key] = value if isinstance(value, str) else value.decode(errors="replace")
        if found.get("openengine-routing-key") == "":
            raise invalid("openengine-routing-key is empty")
        _integer(found, "openengine-priority", INT32)
        return cls(target_dp_rank=_integer(found, "openengine-target-dp-rank", UINT32), lineage=found.get(LINEAGE, ""))


def _integer(found: dict[str, str], key: str, allowed: range) -> int | None:
    text = found.get(key)
    if text is None:
        return None
    digits = text.removeprefix("-") if allowed.start < 0 else text
    if not (digits.isascii() and digits.isdecimal()) or int(text) not in allowed:
        raise invalid(f"{key} is {text!r}: a base-10 integer of {allowed.start} to {allowed.stop - 1}")
    return int(text)
