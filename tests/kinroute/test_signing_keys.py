"""`kinroute keys`: made once, rotated so that nothing that was signed is refused before its end."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.keyring import Keyring, SigningKey, new_signing_key
from enginelink.compact_jwt import signing_key
from kinroute.__main__ import main
from kinroute.signing_keys import MARGIN_S, rotated


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    assert main(["keys", "init", "--keys-file", str(path)]) == 0
    return path


def keys(file: Path, *arguments: str) -> int:
    return main(["keys", *arguments, "--keys-file", str(file)])


def listed(capsys: pytest.CaptureFixture[str], file: Path) -> dict[str, list[dict[str, Any]]]:
    capsys.readouterr()
    keys(file, "list", "--json")
    shown: dict[str, list[dict[str, Any]]] = json.loads(capsys.readouterr().out)
    return shown


def test_a_key_file_is_made_private_without_api_keys_and_never_again(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    before = file.read_bytes()
    made = Keyring.load(file)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (made.api_keys, len(made.envelope_keys), len(made.lineage_keys)) == ((), 1, 1)
    assert keys(file, "init") == 1
    assert "is there already: nothing was changed" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_new_keys_sign_in_five_minutes_and_old_ones_retire_after_all_that_they_sign(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    now_s = time.time()
    assert keys(file, "rotate") == 0

    for kind, life_s in (("envelope_keys", 60), ("lineage_keys", 86_400)):
        old, new = listed(capsys, file)[kind]
        assert now_s + 300 <= new["sign_from"] <= time.time() + 301
        assert new["retire_at"] is None
        assert old["retire_at"] - new["sign_from"] == life_s + 5 + MARGIN_S
    assert Keyring.load(file).id_key, "ids stay what they are"


def test_workers_get_the_new_key_in_the_same_command_or_later(file: Path, tmp_path: Path) -> None:
    theirs, later = tmp_path / "worker.json", tmp_path / "later.json"
    assert keys(file, "rotate", "--sign-from-in", "0s", "--export-worker", str(theirs)) == 0
    assert main(["keys", "export-worker", str(later), "--keys-file", str(file)]) == 0

    assert json.loads(theirs.read_text()) == json.loads(later.read_text())
    held = json.loads(theirs.read_text())
    assert list(held) == ["envelope_keys"]
    assert [key["id"] for key in held["envelope_keys"]] == [key.key_id for key in Keyring.load(file).envelope_keys]
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o600


def test_what_each_key_does_is_shown_and_its_secret_is_not(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    keys(file, "rotate")
    capsys.readouterr()
    keys(file, "list")
    shown = capsys.readouterr().out

    assert shown.count("signs, retires") == 2
    assert shown.count("signs from") == 2
    assert all(stored.secret not in shown for stored in Keyring.load(file).content.envelope_keys)


@example([(0, 0), (57, 300), (68, 0)])
@example([(100, 30), (15, 0), (40, 300), (70, 0)])
@given(
    st.lists(
        st.tuples(st.integers(0, 200) | st.integers(0, 5_000), st.sampled_from([0, 30, 300])), min_size=1, max_size=8
    )
)
def test_at_any_time_some_key_signs_and_what_it_signed_is_believed_to_its_end(steps: list[tuple[int, int]]) -> None:
    life_s, now_s = 65.0, 0.0
    held: tuple[SigningKey, ...] = (new_signing_key(0),)
    signed: list[tuple[str, float]] = []
    for wait_s, sign_from_in_s in steps:
        for step_s in (0.0, wait_s / 2, float(wait_s)):
            key = signing_key([one.key for one in held], now_s + step_s)
            assert key is not None
            signed.append((key.key_id, now_s + step_s))
        now_s += wait_s
        alive = {one.id for one in held if one.retire_at is None or now_s < one.retire_at}
        assert all(key_id in alive for key_id, at_s in signed if now_s < at_s + life_s)
        held = rotated(held, now_s, sign_from_in_s, life_s)
        assert {one.id for one in held} >= alive & {key_id for key_id, _ in signed}
        assert len([one for one in held if one.retire_at is None]) == 1
