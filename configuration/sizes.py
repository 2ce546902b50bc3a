"""Sizes in bytes as settings give them: numbers, or text such as "4GiB"."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
MAX_BYTES = 1 << 60


def _bytes(value: object) -> object:
    """A number of bytes from text such as "4GiB"; anything else as it is."""
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value.strip())
    unit = UNITS.get(match[2].lower()) if match is not None else None
    if match is None or unit is None:
        raise ValueError("must be a number of bytes, or text such as 4GiB (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)")
    size = Decimal(match[1]) * unit
    if size > MAX_BYTES:
        raise ValueError("must be at most 1048576TiB")
    return int(size)


Bytes = Annotated[
    int, Field(strict=True, ge=0, le=MAX_BYTES), BeforeValidator(_bytes, json_schema_input_type=int | str)
]
