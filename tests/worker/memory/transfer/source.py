"""Context ranks in a process of their own: reads commands from stdin and answers on stdout, a JSON value a line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from configuration.tls import ServerTls, server_material
from tests.worker.memory.transfer.samples import SECRET, SESSION_ID, empty_pool, filled_pool
from worker.memory.layout import KvLayout
from worker.memory.transfer.server import TransferServer


class Source:
    """The other process, seen from the test: it serves the ranks of `layouts`, each with `num_pages` empty pages, or
    filled ones. `tls`: as `listen.tls`."""

    def __init__(
        self, layouts: Sequence[KvLayout], num_pages: int | None = None, tls: dict[str, str] | None = None
    ) -> None:
        self.layouts = list(layouts)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.memory.transfer.source"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        served = self._do("serve", layouts=[dataclasses.asdict(one) for one in layouts], num_pages=num_pages, tls=tls)
        self.addresses: list[str] = served["addresses"]
        self.host_key: str = served["host_key"]

    @property
    def ranks(self) -> list[tuple[str, KvLayout]]:
        return list(zip(self.addresses, self.layouts, strict=True))

    def pin(
        self, pages: npt.NDArray[np.int32], num_tokens: int, session_id: str = SESSION_ID, secret: str = SECRET
    ) -> None:
        self._do("pin", session_id=session_id, secret=secret, pages=pages.tolist(), num_tokens=num_tokens)

    def unpin(self, session_id: str = SESSION_ID) -> None:
        self._do("unpin", session_id=session_id)

    def close(self) -> None:
        """It must not have failed, unless it was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(30) <= 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, what: str, **members: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **members}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    servers: list[TransferServer] = []
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_obey(servers, json.loads(line))) + "\n")
        sys.stdout.flush()
    for server in servers:
        server.close()


def _obey(servers: list[TransferServer], command: dict[str, Any]) -> object:
    match command:
        case {"do": "serve", "layouts": layouts, "num_pages": num_pages, "tls": tls}:
            kept = server_material(ServerTls.model_validate(tls), "listen.tls") if tls else None
            for members in layouts:
                layout = KvLayout(**members)
                pool = filled_pool(layout) if num_pages is None else empty_pool(layout, num_pages)
                servers.append(TransferServer(pool, layout, "127.0.0.1", tls=kept))
                servers[-1].start()
            return {"addresses": [server.address for server in servers], "host_key": servers[0].host_key}
        case {"do": "pin", "session_id": session_id, "secret": secret, "pages": pages, "num_tokens": num_tokens}:
            for server in servers:
                server.pin(session_id, secret, np.array(pages, np.int32), num_tokens)
        case {"do": "unpin", "session_id": session_id}:
            for server in servers:
                server.unpin(session_id)
    return None


if __name__ == "__main__":
    main()
