"""Small recorded sessions, as a trace file has them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def request(t: float, *blocks: tuple[int, int], dur: float = 1.0, output: int = 4, **members: Any) -> dict[str, Any]:
    made = {"t": t, "dur": dur, "conversation": "root", "parent": None, "kind": "root", "stop": "tool"}
    return {**made, "output_tokens": output, "blocks": blocks, **members}


def session(*requests: dict[str, Any], block_tokens: int = 4, name: str = "s1") -> dict[str, Any]:
    return {"session": name, "source": "test", "block_tokens": block_tokens, "requests": requests}


def write(path: Path, *sessions: dict[str, Any]) -> Path:
    lines = "".join(json.dumps(one) + "\n" for one in sessions).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path
