"""Pulls pages of finished prefills into one rank's pool."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from configuration.tls import ClientMaterial, Kept
from worker.core.handoff import KvSource, SessionRef
from worker.core.networks import AllowedNetworks
from worker.core.shards import Overlap, overlaps
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer import shared_memory
from worker.memory.transfer.fetch import Fetched, Fetcher
from worker.memory.transfer.layouts import shape_of
from worker.memory.transfer.loop_thread import LoopThread
from worker.memory.transfer.pages import page_bytes_of
from worker.memory.transfer.peers import Peers, PullFailed, Way
from worker.memory.transfer.stretches import Pages
from worker.memory.transfer.wire import WireError

RELEASE_S = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PullResult:
    """`why` is None where every page is in place. Bytes that came over each way, whatever the end."""

    why: str | None
    shared_bytes: int = 0
    tcp_bytes: int = 0


Done = Callable[[PullResult], None]


@dataclass(slots=True, eq=False)
class Pull:
    """Blocks [first_block, first_block + n) of a session on their way into `pages`, int32 [n]."""

    ref: SessionRef
    first_block: int
    pages: Pages
    done: Done
    task: asyncio.Task[None] | None = None
    fetched: Fetched = field(default_factory=Fetched)


class TransferClient:
    """`pull`, `cancel` and `release` may be called from any thread and do not wait; a thread of the client's own works.

    `allowed_networks`: what it dials, in CIDR notation. `timeout_s`: how long a whole pull may take. `tls`: what is
    pulled over TCP is pulled in TLS, or not at all.
    """

    def __init__(
        self,
        pool: DevicePool,
        layout: KvLayout,
        allowed_networks: Sequence[str],
        timeout_s: float,
        tls: Kept[ClientMaterial] | None = None,
    ) -> None:
        self._layout = layout
        self._networks = AllowedNetworks(allowed_networks)
        self._timeout_s = timeout_s
        self._fetcher = Fetcher(page_bytes_of(pool), layout)
        self._host_key = shared_memory.host_key() if self._fetcher.can_map else ""
        self._peers = Peers(tls)
        self._releases: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._pulls: set[Pull] = set()
        self._thread = LoopThread("transfer-client", self._peers.close)

    @property
    def num_pulls(self) -> int:
        """Those whose `done` has not been called."""
        return len(self._pulls)

    def pull(self, ref: SessionRef, first_block: int, pages: Pages, done: Done) -> Pull:
        """Fill `pages` with these blocks. Calls `done` once, on the client's thread, and writes nothing after that.

        Nothing is dialled where a part of `ref` is not to be used.
        """
        pull = Pull(ref, first_block, np.array(pages, np.int32), done)
        with self._lock:
            self._pulls.add(pull)
        if not self._thread.call(self._begin, pull):
            self._end(pull, "the worker is closing")
        return pull

    def cancel(self, pull: Pull) -> None:
        """Its `done` comes soon, if it has not come."""
        self._thread.call(self._cancel, pull)

    def release(self, ref: SessionRef) -> None:
        """Tell the session's rank 0 that its pages are not needed any more.

        Nobody hears whether that worked: what is not released expires.
        """
        self._thread.call(self._begin_release, ref)

    def close(self) -> None:
        """Ends every pull, each with its `done`."""
        self._thread.close()

    # On the client's thread.

    def _begin(self, pull: Pull) -> None:
        pull.task = asyncio.get_running_loop().create_task(self._pull(pull))
        pull.task.add_done_callback(functools.partial(self._ended, pull))

    def _cancel(self, pull: Pull) -> None:
        if pull.task is not None:
            pull.task.cancel()

    def _ended(self, pull: Pull, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._end(pull, "the pull was cancelled")
            return
        match task.exception():
            case None:
                self._end(pull, None)
            case (PullFailed() as error) | BaseExceptionGroup(exceptions=(PullFailed() as error, *_)):
                self._end(pull, str(error))
            case error:
                log.error("a pull failed", exc_info=error)
                self._end(pull, "the pull failed inside this worker")

    def _end(self, pull: Pull, why: str | None) -> None:
        with self._lock:
            self._pulls.discard(pull)
        pull.done(PullResult(why, pull.fetched.shared_bytes, pull.fetched.tcp_bytes))

    async def _pull(self, pull: Pull) -> None:
        """From all ranks at once that hold heads of ours; the first to fail ends the others."""
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        sources = self._sources(pull)
        async with asyncio.TaskGroup() as group:
            for way, overlap in sources:
                group.create_task(self._fetch_by(deadline_s, pull, way, overlap))

    def _sources(self, pull: Pull) -> list[tuple[Way, Overlap]]:
        """All that can be checked before anything is dialled. Raises PullFailed."""
        ref, layout = pull.ref, self._layout
        if difference := shape_of(layout).differs_from(ref.shape):
            raise PullFailed(f"the source's KV cache is of another kind: {difference}")
        if pull.first_block < 0 or not 0 < len(pull.pages) <= ref.num_blocks - pull.first_block:
            raise PullFailed(f"the session has {ref.num_blocks} blocks, not those that were asked for")
        ranges = [(source.head_start, source.head_stop) for source in ref.sources]
        return [
            (self._way(ref, ref.sources[overlap.rank]), overlap)
            for overlap in overlaps(ranges, (layout.head_start, layout.head_stop))
        ]

    def _way(self, ref: SessionRef, source: KvSource) -> Way:
        address = self._networks.address(source.host)
        if address is None:
            raise PullFailed(f"the source {source.address} lies outside of kv_transfer.allowed_networks")
        return Way(address, source.port, is_local=self._host_key != "" and ref.host_key == self._host_key)

    async def _fetch_by(self, deadline_s: float, pull: Pull, way: Way, overlap: Overlap) -> None:
        """Raises PullFailed alone."""
        who = f"context rank {overlap.rank} at {pull.ref.sources[overlap.rank].address}"
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._fetch(pull, way, overlap)
        except TimeoutError as error:
            raise PullFailed(f"{who}: the pull took longer than {self._timeout_s:g} s") from error
        except (OSError, WireError, PullFailed) as error:
            raise PullFailed(f"{who}: {error}") from error

    async def _fetch(self, pull: Pull, way: Way, overlap: Overlap) -> None:
        async with self._peers.reach(way) as (peer, is_local):
            what = (peer, pull.ref, overlap, pull.first_block, pull.pages, pull.fetched)
            if is_local:
                self._peers.share(peer, await self._fetcher.copy(*what))
            else:
                await self._fetcher.receive(*what)

    def _begin_release(self, ref: SessionRef) -> None:
        task = asyncio.get_running_loop().create_task(self._release(ref))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, ref: SessionRef) -> None:
        try:
            async with asyncio.timeout(RELEASE_S), self._peers.reach(self._way(ref, ref.sources[0])) as (peer, _):
                await self._fetcher.release(peer, ref)
        except (OSError, WireError, PullFailed) as error:
            log.info("a session could not be released; it will expire", why=str(error))
