"""Compiles the CUDA attention without a GPU. A program of its own, as Triton decides at import how it works."""

from __future__ import annotations

import itertools
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.model.attention_triton import _attend

SHAPES = [
    {"group": 3, "tokens": 21, "rows": 64, "tile": 64, "block": 32, "width": 64, "dim_tile": 64},
    {"group": 3, "tokens": 5, "rows": 16, "tile": 64, "block": 32, "width": 64, "dim_tile": 64},
    {"group": 8, "tokens": 8, "rows": 64, "tile": 32, "block": 16, "width": 80, "dim_tile": 128},
]
AMPERE, HOPPER = 80, 90


def cubin_bytes(shape: dict[str, int], number: str, capability: int) -> int:
    names: list[str] = _attend.arg_names
    types = {"out_ptr": f"*{number}", "q_ptr": f"*{number}", "pool_ptr": f"*{number}", "scale": "fp32"}
    signature = {
        name: "constexpr" if name in shape else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    constants = {(names.index(name),): value for name, value in shape.items()}
    source = ASTSource(_attend, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return len(compiled.asm["cubin"])


if __name__ == "__main__":
    targets = itertools.product(SHAPES, ("bf16", "fp32"), (AMPERE, HOPPER))
    json.dump([cubin_bytes(*target) for target in targets], sys.stdout)
