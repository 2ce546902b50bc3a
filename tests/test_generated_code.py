from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_generated_code_is_what_the_proto_files_generate(tmp_path: Path) -> None:
    subprocess.run(
        ["scripts/proto", str(tmp_path)], cwd=ROOT, check=True, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    )

    generated = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*_pb2*.py*"))
    committed = sorted(
        file.relative_to(ROOT / "proto")
        for file in (ROOT / "proto").rglob("*_pb2*.py*")
        if "__pycache__" not in file.parts
    )
    assert generated == committed
    for file in generated:
        assert (tmp_path / file).read_text() == (ROOT / "proto" / file).read_text(), file


def test_nothing_of_ours_is_imported_as_proto() -> None:
    """proto-plus owns that name; shadowing it would break every Google client library beside us."""
    assert not (ROOT / "proto" / "__init__.py").exists()
    ours = re.compile(r"^\s*(from|import) proto\b", re.MULTILINE)
    for package in ("edge", "worker", "kinroute", "bench", "tests", "proto"):
        for file in (ROOT / package).rglob("*.py"):
            assert not ours.search(file.read_text()), file
