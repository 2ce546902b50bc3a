"""Parts of a system as processes, for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from kinroute import model_cache
from kinroute.progress import Steps

STOP_S = 20.0


@contextmanager
def process(
    *command: str, until: str = "listening", **environment: str
) -> Iterator[tuple[dict[str, Any], psutil.Process]]:
    """`python -m COMMAND`; yields what it said when it said `until`, and the process. Ends it with the block."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment,
        ) as child,
    ):
        try:
            said: dict[str, Any] = {}
            assert child.stdout is not None
            for line in child.stdout:
                said |= json.loads(line)
                if said["event"] == until:
                    break
            else:
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} ended:\n{log.read().decode()[-2000:]}")
            yield said, psutil.Process(child.pid)
        finally:
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


@contextmanager
def configured(command: str, config: dict[str, Any], *, until: str) -> Iterator[tuple[dict[str, Any], psutil.Process]]:
    """`kinroute COMMAND --config` with `config`; what it records goes when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        with process(
            "kinroute", command, "--config", str(file), until=until, XDG_STATE_HOME=str(Path(folder).resolve())
        ) as started:
            yield started


def embedded_model() -> Path:
    with Steps() as steps:
        return model_cache.embedded_model(steps)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
