"""The CUDA kernel: interpreted on a CPU, compiled without a GPU, and run where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker.model.kernel_cases import CASES

pytestmark = pytest.mark.slow


def run(module: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", f"tests.worker.model.{module}", *arguments]
    variables = os.environ | environment
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def differences(device: str, interpret: bool) -> dict[str, float]:
    found: dict[str, float] = json.loads(run("kernel_cases", device, TRITON_INTERPRET="1" if interpret else "0"))
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    return differences("cpu", interpret=True)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_attends_as_torch_does(interpreted: dict[str, float], name: str) -> None:
    assert interpreted[name] < (0.01 if CASES[name].half else 1e-5)


def test_the_kernel_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    sizes = json.loads(run("kernel_compiling", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)))

    assert len(sizes) == 12
    assert all(sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_compiled_kernel_attends_as_torch_does() -> None:
    compiled = differences("cuda", interpret=False)

    for name, case in CASES.items():
        assert compiled[name] < (0.05 if case.half else 1e-4), name
