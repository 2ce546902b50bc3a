"""What is warned of in a worker's key file."""

from __future__ import annotations

import json
from pathlib import Path

from worker.keys import warnings_of

KEYS = {"envelope_keys": [{"id": "k", "secret": "c2VjcmV0", "sign_from": 0.0}]}


def key_file(folder: Path, mode: int, **more: object) -> Path:
    file = folder / "keys.json"
    file.write_text(json.dumps(KEYS | more))
    file.chmod(mode)
    return file


def test_a_file_of_envelope_keys_that_nobody_else_reads_is_as_it_should_be(tmp_path: Path) -> None:
    assert warnings_of(key_file(tmp_path, 0o600)) == []


def test_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings_of(key_file(tmp_path, 0o604))

    assert "everybody can read" in warning
    assert warnings_of(key_file(tmp_path, 0o440)) == []


def test_an_edges_file_is_warned_of_by_the_names_of_what_a_worker_must_not_have(tmp_path: Path) -> None:
    (warning,) = warnings_of(key_file(tmp_path, 0o600, lineage_keys=["lineage-secret"], id_key="id-secret"))

    assert "id_key, lineage_keys" in warning
    assert "-secret" not in warning
