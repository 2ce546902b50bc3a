"""Certificates: what is wrong with their files is told by name, and changed files are used without a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from bench.certificates import Authority
from configuration.reading import SettingsError
from configuration.tls import ClientTls, Kept, ServerMaterial, ServerTls, Watch, client_material, server_material


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls_of(**files: Any) -> ServerTls:
    return ServerTls.model_validate(files)


def missing(authority: Authority, folder: Path) -> dict[str, str]:
    return {**authority.issue("s").files, "key_file": "/nothing.key"}


def another_key(authority: Authority, folder: Path) -> dict[str, str]:
    return {**authority.issue("s").files, "key_file": authority.issue("other").key_file}


def encrypted(authority: Authority, folder: Path) -> dict[str, str]:
    return authority.issue("s", password="hush").files


def key_as_certificate(authority: Authority, folder: Path) -> dict[str, str]:
    files = authority.issue("s").files
    return {**files, "certificate_file": files["key_file"]}


def certificate_as_key(authority: Authority, folder: Path) -> dict[str, str]:
    files = authority.issue("s").files
    return {**files, "key_file": files["certificate_file"]}


def no_authority(authority: Authority, folder: Path) -> dict[str, str]:
    (folder / "ca.txt").write_text("not a certificate")
    return {**authority.issue("s").files, "client_ca_file": str(folder / "ca.txt")}


def binary(authority: Authority, folder: Path) -> dict[str, str]:
    (folder / "ca.der").write_bytes(bytes(range(128, 256)))
    return {**authority.issue("s").files, "client_ca_file": str(folder / "ca.der")}


def folder_as_file(authority: Authority, folder: Path) -> dict[str, str]:
    return {**authority.issue("s").files, "client_ca_file": str(folder)}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (missing, r"listen\.tls\.key_file is '/nothing\.key': it cannot be read \(No such file"),
        (
            another_key,
            r"listen\.tls\.key_file is '.*other\.key': it is not the key of the first certificate in .*s\.pem",
        ),
        (encrypted, r"listen\.tls\.key_file is '.*s\.key': the key is encrypted"),
        (key_as_certificate, r"listen\.tls\.certificate_file is '.*s\.key': it holds no PEM certificate"),
        (certificate_as_key, r"listen\.tls\.key_file is '.*s\.pem': it cannot be used .* one PEM private key"),
        (no_authority, r"listen\.tls\.client_ca_file is '.*ca\.txt': it holds no PEM certificate"),
        (binary, r"listen\.tls\.client_ca_file is '.*ca\.der': it holds no PEM certificate"),
        (folder_as_file, r"listen\.tls\.client_ca_file is .*: it cannot be read \(Is a directory\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_key_and_what_is_wrong(
    tmp_path: Path, authority: Authority, files: Callable[[Authority, Path], dict[str, str]], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        server_material(tls_of(**files(authority, tmp_path)), "listen.tls")


def test_a_clients_certificate_and_key_need_each_other(authority: Authority) -> None:
    issued = authority.issue("edge")
    for given, absent in (("key_file", "certificate_file"), ("certificate_file", "key_file")):
        tls = ClientTls.model_validate({"ca_file": authority.file, given: getattr(issued, given)})
        with pytest.raises(SettingsError, match=rf"worker_tls\.{absent} is missing: worker_tls\.{given} is set"):
            client_material(tls, "worker_tls")

    whole = client_material(ClientTls.model_validate({"ca_file": authority.file, **issued.files}), "worker_tls")
    assert whole.current.certificate == Path(issued.certificate_file).read_bytes()


def test_new_files_are_used_once_all_of_them_have_come(authority: Authority) -> None:
    issued = authority.issue("s")
    kept = server_material(tls_of(**issued.files), "listen.tls")
    old = kept.current
    old_key = Path(issued.key_file).read_bytes()

    authority.issue("s")
    kept.look()
    assert kept.current is old, "they may still be about to change"
    kept.look()
    assert kept.current.certificate == Path(issued.certificate_file).read_bytes() != old.certificate
    assert kept.current.key == Path(issued.key_file).read_bytes() != old_key


def test_broken_new_files_leave_the_old_ones_in_use_and_are_warned_of_once(authority: Authority) -> None:
    issued = authority.issue("s")
    kept = server_material(tls_of(**issued.files), "listen.tls")
    old, good = kept.current, Path(issued.key_file).read_bytes()

    Path(issued.key_file).write_text("zzz")
    with capture_logs() as logs:
        for _ in range(4):
            kept.look()
    assert kept.current is old
    assert [(line["log_level"], line["event"]) for line in logs] == [("warning", "the certificates stay as they were")]
    assert "s.key" in logs[0]["why"]
    assert "zzz" not in str(logs), "no content of a key file is told"

    Path(issued.key_file).unlink()
    kept.look()
    kept.look()
    assert kept.current is old
    Path(issued.key_file).write_bytes(good)
    kept.look()
    kept.look()
    assert kept.current is not old


def test_files_behind_a_link_that_is_turned_are_new_ones(tmp_path: Path) -> None:
    """As a cluster mounts secrets: a link to a folder, replaced as a whole."""
    first, second = (Authority(tmp_path / name) for name in ("first", "second"))
    names = {}
    for one, folder in ((first, "first"), (second, "second")):
        one.issue("s")
        names[folder] = tmp_path / folder
    link = tmp_path / "data"
    link.symlink_to(names["first"])
    kept = server_material(tls_of(certificate_file=link / "s.pem", key_file=link / "s.key"), "listen.tls")

    (tmp_path / "turned").symlink_to(names["second"])
    os.replace(tmp_path / "turned", link)
    kept.look()
    kept.look()

    assert kept.current.certificate == (names["second"] / "s.pem").read_bytes()


def test_a_watch_looks_by_itself_until_it_is_closed(authority: Authority) -> None:
    issued = authority.issue("s")
    kept: Kept[ServerMaterial] = server_material(tls_of(**issued.files), "listen.tls")
    old = kept.current
    watch = Watch([kept], every_s=0.01)

    authority.issue("s")
    end_s = time.monotonic() + 10.0
    while kept.current is old:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    watch.close()

    used = kept.current
    authority.issue("s")
    time.sleep(0.1)
    assert kept.current is used
    Watch([]).close()
