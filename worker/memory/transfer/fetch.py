"""One pull from one context rank: its bytes over TCP, or out of its memory."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass

import numpy as np

from worker.core.handoff import KvSource, SessionRef
from worker.core.shards import Overlap
from worker.memory.layout import KvLayout
from worker.memory.transfer import wire
from worker.memory.transfer.layouts import shape_of
from worker.memory.transfer.pages import HostPages, PageBytes, rows_in
from worker.memory.transfer.peers import MappedPool, Peer
from worker.memory.transfer.stretches import Pages
from worker.memory.transfer.wire import Kind, Request, WireError


@dataclass(slots=True)
class Fetched:
    """Bytes that came over each way."""

    shared_bytes: int = 0
    tcp_bytes: int = 0


class Fetcher:
    """Fills pages of one pool. `puller`: the id under which this pool's rank pulls, new in every process."""

    def __init__(self, pages: PageBytes, layout: KvLayout) -> None:
        self._pages = pages
        self._layout = layout
        self._shape_id = wire.shape_id(shape_of(layout))
        self._puller = secrets.token_bytes(wire.ID_BYTES)

    @property
    def can_map(self) -> bool:
        return isinstance(self._pages, HostPages)

    async def receive(
        self, peer: Peer, ref: SessionRef, overlap: Overlap, first_block: int, pages: Pages, fetched: Fetched
    ) -> None:
        """Over TCP, straight into the pages where they are whole. Raises OSError, WireError, PullFailed."""
        heads = self._own_heads(overlap)
        reply = await peer.ask(self._pull(ref, overlap, first_block, len(pages)), _secret(ref))
        due = self._layout.page_bytes // self._layout.heads * (heads[1] - heads[0]) * len(pages)
        if reply.num_bytes != due:
            raise WireError(f"it sends {reply.num_bytes} bytes where {due} are due")
        for pieces in self._pages.write(pages, heads):
            await peer.connection.receive_into(*pieces)
            fetched.tcp_bytes += sum(map(len, pieces))
        await peer.hear_verdict()

    async def copy(
        self, peer: Peer, ref: SessionRef, overlap: Overlap, first_block: int, pages: Pages, fetched: Fetched
    ) -> MappedPool:
        """Out of the source's memory; then it says whether that was pinned all the while. Returns what was mapped.

        Raises OSError, WireError, PullFailed.
        """
        assert isinstance(self._pages, HostPages), "only a pool in this host's memory is copied into"
        secret = _secret(ref)
        pool = peer.pool or await peer.ask_for_pool(self._request(Kind.MAP, ref), secret)
        reply = await peer.ask(self._pull(ref, overlap, first_block, len(pages)), secret)
        if reply.num_bytes != pages.nbytes:
            raise WireError(f"it names {reply.num_bytes // pages.itemsize} pages where {len(pages)} are due")
        source_pages = np.frombuffer(await peer.connection.receive(reply.num_bytes), np.int32)
        source = ref.sources[overlap.rank]
        rows = rows_in(pool.memory, self._layout_of(source))
        if source_pages.min() < 0 or source_pages.max() >= len(rows):
            raise WireError("it names a page that it does not have")
        source_heads = (overlap.head_start - source.head_start, overlap.head_stop - source.head_start)
        for copied in self._pages.copy_from(rows, source_pages, source_heads, pages, self._own_heads(overlap)):
            fetched.shared_bytes += copied
            await asyncio.sleep(0)
            peer.connection.require_silence()
        await peer.ask(self._request(Kind.CONFIRM, ref), secret)
        return pool

    async def release(self, peer: Peer, ref: SessionRef) -> None:
        await peer.ask(self._request(Kind.RELEASE, ref), _secret(ref))

    def _own_heads(self, overlap: Overlap) -> tuple[int, int]:
        return overlap.head_start - self._layout.head_start, overlap.head_stop - self._layout.head_start

    def _layout_of(self, source: KvSource) -> KvLayout:
        return dataclasses.replace(self._layout, head_start=source.head_start, head_stop=source.head_stop)

    def _pull(self, ref: SessionRef, overlap: Overlap, first_block: int, num_blocks: int) -> Request:
        request = self._request(Kind.PULL, ref)
        return dataclasses.replace(
            request,
            first_block=first_block,
            num_blocks=num_blocks,
            head_start=overlap.head_start,
            head_stop=overlap.head_stop,
        )

    def _request(self, kind: Kind, ref: SessionRef) -> Request:
        return Request(kind, bytes.fromhex(ref.session_id), self._puller, self._shape_id)


def _secret(ref: SessionRef) -> bytes:
    return bytes.fromhex(ref.secret)
