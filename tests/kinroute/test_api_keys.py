"""`kinroute key`: who gets a key, what is kept of it, and what becomes of it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edge.core.auth import Authenticator
from edge.core.errors import EdgeError
from edge.core.types import Principal, TenantLimits
from edge.keyring import Keyring
from kinroute.__main__ import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    Keyring.create(path)
    return path


def key(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> str:
    """What the command printed."""
    capsys.readouterr()
    assert main(["key", *arguments, "--keys-file", str(file)]) == 0
    return capsys.readouterr().out


def made(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(key(capsys, file, *arguments, "--json"))
    return shown


def principal(file: Path, secret: str, now_s: float | None = None) -> Principal | None:
    """Who calls with `secret`, as an edge with this file sees it."""
    keyring = Keyring.load(file)
    gate = Authenticator(keyring.principals, ends_s=keyring.ends_s)
    try:
        return gate.authenticate(None, secret, time.time() if now_s is None else now_s)
    except EdgeError:
        return None


def test_a_key_is_shown_once_and_kept_as_a_hash(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    secret = key(capsys, file, "create", "--tenant", "acme", "--subject", "ann", "--scope", "affinity").strip()

    [stored] = Keyring.load(file).api_keys
    assert principal(file, secret) == Principal("acme", "ann", frozenset({"affinity"}), stored.id)
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = key(capsys, file, "list")
    assert all(word in listed for word in (stored.id, "tenant acme, subject ann, scopes affinity", "created"))
    assert secret not in listed
    assert stored.sha256 not in listed + key(capsys, file, "list", "--json")


def test_a_key_may_have_scopes_limits_and_an_end(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    shown = made(
        capsys,
        file,
        "create",
        *("--subject", "ann", "--scope", "operator", "--scope", "affinity"),
        *("--limits", "requests=2,children=3", "--expires", "30d"),
    )

    found = principal(file, shown["key"])
    assert found is not None
    assert (found.tenant, found.limits) == ("default", TenantLimits(requests=2, children=3))
    assert shown["scopes"] == ["affinity", "operator"]
    assert shown["limits"] == {"requests": 2, "children": 3}
    assert shown["expires"] - shown["created"] == 30 * 86_400
    assert principal(file, shown["key"], shown["expires"]) is None
    assert "limits requests=2, children=3" in key(capsys, file, "list")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--subject", "ann", "--scope", "admin"), "must be one of affinity, operator, not 'admin'"),
        (("--subject", "a\nb"), "printable text"),
        (("--subject", ""), "1 to 256 bytes"),
        (("--subject", "ann", "--limits", "requests=0"), "numbers from 1 on, not 'requests=0'"),
        (("--subject", "ann", "--limits", "requets=1"), "names of requests, "),
        (("--subject", "ann", "--expires", "soon"), "such as 12h, not 'soon'"),
        ((), "--subject"),
    ],
)
def test_what_makes_no_key_says_what_is_allowed(
    capsys: pytest.CaptureFixture[str], file: Path, arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["key", "create", "--keys-file", str(file), *arguments])

    assert said in capsys.readouterr().err
    assert Keyring.load(file).api_keys == ()


def test_a_revoked_key_is_gone_and_others_stay(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    one, other = (made(capsys, file, "create", "--subject", name) for name in ("ann", "bob"))
    key(capsys, file, "revoke", one["id"])

    assert principal(file, one["key"]) is None
    assert principal(file, other["key"]) is not None
    assert main(["key", "revoke", one["id"], "--keys-file", str(file)]) == 1
    assert "There is no key with the id" in capsys.readouterr().err


def test_a_rotated_key_keeps_its_subject_and_the_old_one_ends(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    old = made(capsys, file, "create", "--tenant", "acme", "--subject", "ann", "--scope", "affinity")
    new = made(capsys, file, "rotate", old["id"], "--grace", "1h")
    now_s = time.time()

    for shown in (old, new):
        found = principal(file, shown["key"], now_s)
        assert found is not None
        assert (found.tenant, found.subject, found.scopes) == ("acme", "ann", frozenset({"affinity"}))
    assert principal(file, old["key"], now_s + 3_600) is None
    assert principal(file, new["key"], now_s + 3_600) is not None

    newer = made(capsys, file, "rotate", new["id"])
    assert principal(file, new["key"]) is None, "no grace was given"
    assert principal(file, newer["key"]) is not None


def test_the_key_that_up_prints_can_be_rotated_and_revoked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first = Keyring.open(file)
    new = made(capsys, file, "rotate", first.api_keys[0].id)
    assert Keyring.open(file).local_key == new["key"]

    key(capsys, file, "revoke", new["id"])
    again = Keyring.open(file)
    assert principal(file, again.local_key) is not None, "up makes another one"
    assert principal(file, new["key"]) is None


def test_commands_at_the_same_time_lose_no_key(file: Path) -> None:
    command = [sys.executable, "-m", "kinroute", "key", "create", "--keys-file", str(file), "--subject"]
    running = [
        subprocess.Popen([*command, f"s{number}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for number in range(8)
    ]

    assert [process.wait(60.0) for process in running] == [0] * 8
    assert {stored.subject for stored in Keyring.load(file).api_keys} == {f"s{number}" for number in range(8)}


def test_without_a_key_file_the_command_says_which(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (["list"], ["create", "--subject", "ann"]):
        assert main(["key", *arguments, "--keys-file", str(tmp_path / "none.json")]) == 1
        assert f"There is no key file {tmp_path / 'none.json'}" in capsys.readouterr().err
