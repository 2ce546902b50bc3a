"""Files with keys while an edge runs: what changes in them counts within seconds, what is broken does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from edge.key_watch import WatchedFile
from edge.keyring import Keyring, KeyringError
from kinroute.__main__ import main
from tests.edge.test_app import edge_of

WAIT_S = 20.0


@asynccontextmanager
async def watched(path: Path, told: Callable[[Keyring], None]) -> AsyncIterator[WatchedFile[Keyring]]:
    file = WatchedFile(path, lambda: Keyring.load(path), poll_s=0.01)
    before = asyncio.all_tasks()
    task = asyncio.create_task(file.watch([told]))
    try:
        yield file
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == before


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_a_file_that_is_replaced_or_written_to_is_read_again_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    Keyring.open(path)
    told: list[str] = []
    async with watched(path, lambda keyring: told.append(keyring.local_key)):
        new = Keyring.open(path, new_key=True).local_key
        await until(lambda: told == [new])
        path.write_text(path.read_text().replace(new, "kr-other"))
        await until(lambda: told[-1] == "kr-other")
        await asyncio.sleep(0.1)

    assert told[0] == new
    assert told.count("kr-other") == 1


@pytest.mark.anyio
async def test_a_file_that_is_damaged_open_to_others_or_gone_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = Keyring.open(path)
    whole = path.read_bytes()
    told: list[Keyring] = []
    async with watched(path, told.append) as file:
        for breaking in (
            lambda: path.write_bytes(whole[:40]),
            lambda: path.chmod(0o644),
            path.unlink,
        ):
            breaking()
            await asyncio.sleep(0.1)
            assert (told, file.value.local_key) == ([], first.local_key)
        path.touch(0o600)
        path.write_bytes(whole)
        await until(lambda: bool(told))

    assert told[-1].local_key == first.local_key


@pytest.mark.anyio
async def test_links_are_followed_as_mounted_secrets_are_swapped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Keyring.open(tmp_path / name)
    link = tmp_path / "keys.json"
    link.symlink_to("a")
    told: list[str] = []
    async with watched(link, lambda keyring: told.append(keyring.local_key)):
        (tmp_path / "next").symlink_to("b")
        (tmp_path / "next").replace(link)
        await until(lambda: bool(told))

    assert told == [Keyring.load(tmp_path / "b").local_key]


def test_who_makes_it_learns_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match="There is no key file"):
        WatchedFile(tmp_path / "none", lambda: Keyring.load(tmp_path / "none"))


def test_a_revoked_key_stops_working_on_every_edge_and_on_connections_that_are_open(tmp_path: Path) -> None:
    nowhere = ["127.0.0.1:9"]
    with edge_of(tmp_path, nowhere, nowhere) as one, edge_of(tmp_path, nowhere, nowhere) as other:
        headers = {"authorization": f"Bearer {one.key}"}
        with (
            httpx.Client(base_url=one.url, headers=headers, timeout=WAIT_S) as first,
            httpx.Client(base_url=other.url, headers=headers, timeout=WAIT_S) as second,
        ):
            assert [client.get("/v1/models").status_code for client in (first, second)] == [200, 200]
            [stored] = Keyring.load(tmp_path / "keys.json").api_keys
            assert main(["key", "revoke", stored.id, "--keys-file", str(tmp_path / "keys.json")]) == 0
            end_s = time.monotonic() + WAIT_S
            while [client.get("/v1/models").status_code for client in (first, second)] != [401, 401]:
                assert time.monotonic() < end_s, "it still works"
                time.sleep(0.05)
