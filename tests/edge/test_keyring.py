"""The key file: made once, private, replaced whole."""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge.core.types import Principal
from edge.keyring import Keyring, KeyringError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_first_start_makes_a_private_file_with_a_key_that_may_name_parents(path: Path) -> None:
    made = Keyring.open(path)

    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    [stored] = made.api_keys
    assert stored.sha256 == hashlib.sha256(made.local_key.encode()).hexdigest()
    assert stored.principal == Principal("default", "local", frozenset({"affinity"}), stored.id)
    assert len(made.id_key) == 32
    assert [len(key.secret) for key in made.envelope_keys] == [32]


def test_later_starts_find_the_same_keys(path: Path) -> None:
    made, found = Keyring.open(path), Keyring.open(path)

    assert (found.local_key, found.id_key, found.api_keys) == (made.local_key, made.id_key, made.api_keys)
    assert found.envelope_keys == made.envelope_keys


def test_processes_that_start_together_end_up_with_the_same_keys(path: Path) -> None:
    opened: list[Keyring] = []
    threads = [threading.Thread(target=lambda: opened.append(Keyring.open(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {keyring.local_key for keyring in opened} == {Keyring.load(path).local_key}
    assert len(opened) == 8


def test_a_new_key_replaces_the_local_one_and_nothing_else(path: Path) -> None:
    old = Keyring.open(path)
    rewrite(path, lambda content: content["api_keys"].append({"id": "ci", "sha256": "0" * 64, "subject": "ci"}))
    new = Keyring.open(path, new_key=True)

    assert new.local_key != old.local_key
    digests = [key.sha256 for key in new.api_keys]
    assert digests == ["0" * 64, hashlib.sha256(new.local_key.encode()).hexdigest()]
    assert new.api_keys[1].principal.subject == old.api_keys[0].principal.subject, "its conversations stay its own"
    assert (new.id_key, new.envelope_keys) == (old.id_key, old.envelope_keys)
    assert Keyring.load(path).local_key == new.local_key
    assert mode(path) == 0o600
    assert {file.name for file in path.parent.iterdir()} == {"keys.json", ".keys.json.lock"}, "nothing half written"


def test_who_is_reading_the_old_file_reads_it_whole(path: Path) -> None:
    old = Keyring.open(path)
    with path.open("rb") as reading:
        new = Keyring.open(path, new_key=True)
        assert json.load(reading)["local_key"] == old.local_key

    assert Keyring.load(path).local_key == new.local_key


def test_a_first_start_makes_the_folders_that_are_missing(tmp_path: Path) -> None:
    assert Keyring.open(tmp_path / "a" / "b" / "keys.json").local_key


def test_worker_keys_are_replaced_whole(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "worker.json"
    theirs.write_text("x" * 10_000)
    theirs.chmod(0o644)
    keyring = Keyring.open(path)
    keyring.write_worker_keys(theirs)

    [stored] = json.loads(theirs.read_text())["envelope_keys"]
    assert stored["id"] == keyring.envelope_keys[0].key_id
    assert mode(theirs) == 0o600


def test_a_group_may_read_a_file_since_a_mounted_secret_has_one(path: Path) -> None:
    made = Keyring.open(path)
    path.chmod(0o440)

    assert Keyring.load(path).id_key == made.id_key


@pytest.mark.parametrize("bits", [0o604, 0o660, 0o602])
def test_a_file_that_everybody_can_read_or_a_group_write_is_refused(path: Path, bits: int) -> None:
    Keyring.open(path)
    path.chmod(bits)

    with pytest.raises(KeyringError, match=f"chmod 600 {path}"):
        Keyring.open(path)


def test_a_missing_file_is_named_and_not_made_by_who_only_reads(path: Path) -> None:
    with pytest.raises(KeyringError, match=f"There is no key file {path}"):
        Keyring.load(path)
    assert not path.exists()


def set_to(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({name: value})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.pop("id_key"), "damaged"),
        (set_to("api_keys", {}), "damaged"),
        (set_to("version", 2), "has version 2; this release reads 1"),
        (set_to("id_key", "!"), "a key that cannot be used"),
        (set_to("id_key", "AAAA"), "an id_key of 3 bytes: at least 32"),
        (set_to("envelope_keys", [{"id": "e", "secret": "AAAA"}]), "signing key e has 3 bytes: at least 32"),
    ],
)
def test_a_file_of_another_form_says_what_is_wrong(
    path: Path, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    Keyring.open(path)
    rewrite(path, change)

    with pytest.raises(KeyringError, match=why) as caught:
        Keyring.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_json_says_how_to_get_a_new_one(path: Path) -> None:
    Keyring.open(path)
    path.write_text("{")

    with pytest.raises(KeyringError, match="move it away to have new keys made"):
        Keyring.load(path)


def test_workers_are_given_the_envelope_keys_alone(path: Path, tmp_path: Path) -> None:
    keyring, theirs = Keyring.open(path), tmp_path / "worker.json"
    keyring.write_worker_keys(theirs)

    assert mode(theirs) == 0o600
    assert list(json.loads(theirs.read_text())) == ["envelope_keys"]
    assert keyring.local_key not in theirs.read_text()
