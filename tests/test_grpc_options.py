"""gRPC ignores options whose names it does not know: a slip in one would go unnoticed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPTION = re.compile(r'\("(grpc\.[a-z0-9_.]+)", ')


def test_every_option_of_a_channel_or_a_server_is_one_that_grpc_knows() -> None:
    found = importlib.util.find_spec("grpc._cython.cygrpc")
    assert found is not None
    assert found.origin is not None
    library = Path(found.origin).read_bytes()
    named = {
        name
        for package in ("edge", "worker", "bench", "kinroute")
        for file in (ROOT / package).rglob("*.py")
        for name in OPTION.findall(file.read_text())
    }

    assert "grpc.keepalive_time_ms" in named, "the pattern finds them"
    assert {name for name in named if name.encode() + b"\0" not in library} == set()
