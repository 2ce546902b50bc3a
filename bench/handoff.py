"""Handoff: GB/s and µs per 64 KB page out of another process, through shared memory, TCP, and TCP with mutual TLS,
against a plain memcpy.

The source is a process of its own. Pages lie side by side, or scattered; `half` pulls half of each page's heads, as
between groups of unequal size. All in one run: `memcpy` copies as many bytes from one array to another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.certificates import Authority
from configuration.tls import ClientTls, ServerTls, client_material, server_material
from worker.core.handoff import KvSource, SessionRef
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer.client import PullResult, TransferClient
from worker.memory.transfer.layouts import shape_of
from worker.memory.transfer.server import TransferServer

WHOLE = KvLayout(
    num_layers=4, num_kv_heads=4, head_dim=64, tokens_per_block=16, dtype="bfloat16", head_start=0, head_stop=4
)
HALF = dataclasses.replace(WHOLE, head_stop=2)
NUM_PAGES = 4096
REPEATS = 7
LONE_PULLS = 200
TIMEOUT_S = 60.0

WAYS = ("shared memory", "tcp", "tls")

Pages = npt.NDArray[np.int32]


def run(*, num_pages: int = NUM_PAGES, repeats: int = REPEATS, lone_pulls: int = LONE_PULLS) -> dict[str, Any]:
    """Rows by way and arrangement, medians of `repeats`; `lone_page_us` is a whole pull of one page."""
    near = np.arange(num_pages, dtype=np.int32)
    far = np.random.default_rng(0).permutation(near)
    rows = [_memcpy(num_pages * WHOLE.page_bytes, repeats)]
    for layout, heads in ((WHOLE, "whole"), (HALF, "half")):
        with _ends(layout, num_pages) as ends:
            for way, (arrangement, pages) in itertools.product(WAYS, (("near", near), ("far", far))):
                source, rank = ends[way]
                seconds = [rank.pull(source, pages, way) for _ in range(repeats + 1)][1:]
                row = _row(way, f"{heads}, {arrangement}", num_pages * layout.page_bytes, seconds, layout.page_bytes)
                if heads == "whole" and arrangement == "near":
                    lone = [rank.pull(source, pages[:1], way) for _ in range(lone_pulls)]
                    row["lone_page_us"] = round(statistics.median(lone) * 1e6, 1)
                rows.append(row)
    for row in rows:
        row["to_memcpy"] = round(row["gb_per_s"] / rows[0]["gb_per_s"], 3)
    return {"page_bytes": WHOLE.page_bytes, "pages": num_pages, "repeats": repeats, "rows": rows}


def table(results: dict[str, Any]) -> str:
    lines = [f"{'way':<14} {'pages':<12} {'GB/s':>7} {'µs per 64 KB':>13} {'to memcpy':>10} {'one page, µs':>13}"]
    lines += [
        f"{row['way']:<14} {row['pages']:<12} {row['gb_per_s']:>7.2f} {row['us_per_64_kb']:>13.2f} "
        f"{row['to_memcpy']:>10.2f} {row.get('lone_page_us', ''):>13}"
        for row in results["rows"]
    ]
    return "\n".join(lines)


def _row(way: str, pages: str, num_bytes: int, seconds: list[float], page_bytes: int) -> dict[str, Any]:
    typical_s = statistics.median(seconds)
    return {
        "way": way,
        "pages": pages,
        "pulled_page_bytes": page_bytes,
        "gb_per_s": round(num_bytes / typical_s / 1e9, 3),
        "us_per_64_kb": round(typical_s / (num_bytes / 65536) * 1e6, 3),
        "seconds_min": round(min(seconds), 5),
        "seconds_max": round(max(seconds), 5),
    }


def _memcpy(num_bytes: int, repeats: int) -> dict[str, Any]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    seconds = [_timed(lambda: np.copyto(target, source)) for _ in range(repeats + 1)][1:]
    return _row("memcpy", "one array", num_bytes, seconds, num_bytes)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


@dataclass(slots=True)
class _Source:
    """The other process: a line on stdin pins all pages given on it under a new session."""

    process: subprocess.Popen[str]
    address: str
    host_key: str

    def pin(self, pages: Pages) -> SessionRef:
        session_id, secret = secrets.token_hex(16), secrets.token_hex(32)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([session_id, secret, pages.tolist()]) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        host, _, port = self.address.rpartition(":")
        return SessionRef(
            session_id=session_id,
            secret=secret,
            instance_id="bench",
            host_key=self.host_key,
            request_id=1,
            first_token=0,
            prompt_tokens=len(pages) * WHOLE.tokens_per_block,
            cached_prompt_tokens=0,
            shape=shape_of(WHOLE),
            sources=(KvSource(host, int(port), 0, WHOLE.num_kv_heads),),
        )


@contextlib.contextmanager
def _ends(layout: KvLayout, num_pages: int) -> Iterator[dict[str, tuple[_Source, _Rank]]]:
    """Both ends of each way."""
    with contextlib.ExitStack() as stack:
        authority = Authority(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        worker = authority.issue("worker")
        plain = stack.enter_context(_source(num_pages)), stack.enter_context(_rank(layout, num_pages))
        files = (authority.file, *worker.pair)
        tls = stack.enter_context(_source(num_pages, *files)), stack.enter_context(_rank(layout, num_pages, *files))
        yield {"shared memory": plain, "tcp": plain, "tls": tls}


@contextlib.contextmanager
def _source(num_pages: int, *files: str) -> Iterator[_Source]:
    """`files`: authority, certificate and key, where it speaks TLS."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.handoff", "--serve", str(num_pages), *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield _Source(process, *json.loads(process.stdout.readline()))
        process.stdin.close()


class _Rank:
    """The pulling side."""

    def __init__(self, layout: KvLayout, num_pages: int, *files: str) -> None:
        tls = None
        if files:
            names = dict(zip(("ca_file", "certificate_file", "key_file"), files, strict=True))
            tls = client_material(ClientTls.model_validate(names), "tls")
        self._pool = DevicePool(layout, num_pages, torch.device("cpu"))
        self._pool.tensor.zero_()
        self._client = TransferClient(self._pool, layout, ("127.0.0.0/8",), TIMEOUT_S, tls)

    def pull(self, source: _Source, pages: Pages, way: str) -> float:
        """Seconds from the call to its callback."""
        ref = source.pin(pages)
        if way != "shared memory":
            ref = dataclasses.replace(ref, host_key="")
        results: list[PullResult] = []
        came = threading.Event()

        def done(result: PullResult) -> None:
            results.append(result)
            came.set()

        began_s = time.perf_counter()
        self._client.pull(ref, 0, pages, done)
        came.wait()
        taken_s = time.perf_counter() - began_s
        assert results[0].why is None, results[0].why
        assert bool(results[0].tcp_bytes) == (way != "shared memory"), f"the pages did not come over {way}"
        return taken_s

    def close(self) -> None:
        self._client.close()
        self._pool.close()


@contextlib.contextmanager
def _rank(layout: KvLayout, num_pages: int, *files: str) -> Iterator[_Rank]:
    with contextlib.closing(_Rank(layout, num_pages, *files)) as rank:
        yield rank


def _serve(num_pages: int, *files: str) -> None:
    tls = None
    if files:
        names = dict(zip(("client_ca_file", "certificate_file", "key_file"), files, strict=True))
        tls = server_material(ServerTls.model_validate(names), "tls")
    pool = DevicePool(WHOLE, num_pages, torch.device("cpu"))
    pool.tensor.fill_(1.0)
    server = TransferServer(pool, WHOLE, "127.0.0.1", tls=tls)
    server.start()
    print(json.dumps([server.address, server.host_key]), flush=True)
    for line in sys.stdin:
        session_id, secret, pages = json.loads(line)
        server.pin(session_id, secret, np.array(pages, np.int32), len(pages) * WHOLE.tokens_per_block)
        print(flush=True)
    server.close()
    pool.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(int(sys.argv[2]), *sys.argv[3:])
    else:
        measured = run()
        print(table(measured), file=sys.stderr)
        print(json.dumps(measured, indent=1))
