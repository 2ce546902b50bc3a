"""Two ranks as torchrun starts them, of which one is not like the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.worker.clients import until
from tests.worker.running import MODEL_NAME

READY_S = 90.0


@dataclass(frozen=True)
class Ranks:
    """`processes`: rank 0 first; what each says is in `folder`/rank-N.log."""

    grpc: str
    admin: str
    folder: Path
    processes: list[subprocess.Popen[bytes]]

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()


@contextmanager
def two_ranks(folder: Path, model: Path, odd: int, module: Sequence[str], **config: Any) -> Iterator[Ranks]:
    """They are ready. Rank `odd` is `python -m MODULE CONFIG…`: `module` is its name and what follows the file."""
    ports = [_free_port() for _ in range(4)]
    (folder / "token").write_text("t" * 32)
    file = folder / "worker.yaml"
    given = {
        "model": str(model),
        "served_model_name": MODEL_NAME,
        "tensor_parallel_size": 2,
        "listen": {"grpc": f"127.0.0.1:{ports[0]}", "admin": f"127.0.0.1:{ports[1]}"},
        "group": {"control_port": ports[2], "token_file": str(folder / "token")},
        "device": "cpu",
        "dtype": "float32",
        "threads_per_rank": 1,
    }
    file.write_text(yaml.safe_dump(given | config))
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[3])}
    sound = [sys.executable, "-m", "kinroute", "worker", "--config", str(file)]
    wrong = [sys.executable, "-m", module[0], str(file), *module[1:]]
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            log = stack.enter_context((folder / f"rank-{rank}.log").open("wb"))
            place = group | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONHASHSEED": str(rank + 1)}
            command = wrong if rank == odd else sound
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | place)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        until(lambda: _is_ready(ports[1]), READY_S)
        yield Ranks(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", folder, processes)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
