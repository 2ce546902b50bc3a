"""The prompts and answers of a load as paths of segments: stretches of blocks that no two requests ever part.

A block id fixes all that is in front of it, so the blocks of a load are a trie. Where no request ends and no path
branches, blocks are used and let go together: a *segment* is a longest such stretch. A load of millions of blocks has
some ten thousand segments, and whatever is said of a cache by the block can be computed by the segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kinroute.replay.arm import CONTEXT_LEG_S

Int64s: TypeAlias = npt.NDArray[np.int64]
Float64s: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Role: TypeAlias = Literal["aggregated", "context"]
Runs: TypeAlias = Sequence[tuple[int, int]]
"""(first id, count) of block ids that follow each other."""


class Blocks(Protocol):
    """What is needed of a played request."""

    @property
    def t_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def prompt_blocks(self) -> Runs: ...
    @property
    def answer_blocks(self) -> Runs: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """`length`, `parent`, `depth`: [S], by segment, parents first; `parent` -1 is none; `depth`: blocks in front of it.

    `paths`: the segments of all requests one after the other, request i's prompt in [starts[i], prompt_ends[i]), its
    answer, where answers are kept, in [prompt_ends[i], starts[i + 1]). `prompt_blocks`: [N]. `arrivals_s`, `ends_s`:
    [N], when it comes and when it lets go of its path: when its answer ends, or when a context leg is handed over.
    `is_repeated_end`: [S], segments of one block with which some prompt ends though another request had it before: it
    is computed again each time a prompt ends with it.
    """

    length: Int64s
    parent: Int64s
    depth: Int64s
    is_repeated_end: Bools
    paths: Int64s
    starts: Int64s
    prompt_ends: Int64s
    prompt_blocks: Int64s
    arrivals_s: Float64s
    ends_s: Float64s

    @property
    def num_requests(self) -> int:
        return len(self.prompt_ends)

    def prompt(self, request: int) -> Int64s:
        """Its path, from the root down."""
        return self.paths[self.starts[request] : self.prompt_ends[request]]

    def path(self, request: int) -> Int64s:
        """Prompt and answer."""
        return self.paths[self.starts[request] : self.starts[request + 1]]


def segments_of(requests: Sequence[Blocks], *, role: Role) -> Segments:
    """Split a load, which comes by arrival. In role context answers are not kept, so they are left out.

    Only full blocks count: the last token of an answer is not computed, so its block is never full.
    """
    prompts = [_joined(request.prompt_blocks) for request in requests]
    answers = [
        _joined(_first(request.answer_blocks, (request.output_tokens - 1) // request.block_tokens))
        if role == "aggregated"
        else []
        for request in requests
    ]
    runs, counts = _flat(prompts, answers)
    edges = np.concatenate([runs[:, 0], runs.sum(axis=1)])
    trie = _Trie(edges, runs, counts)
    repeated = trie.repeated_ends()
    if len(repeated):
        trie = _Trie(np.concatenate([edges, repeated]), runs, counts)
    arrivals = np.array([request.t_s for request in requests], np.float64)
    if role == "context":
        return trie.joined(arrivals, arrivals + CONTEXT_LEG_S)
    durations = np.array([request.duration_s for request in requests], np.float64)
    return trie.joined(arrivals, arrivals + durations)


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs that follow each other are one, and none is empty."""
    joined: list[tuple[int, int]] = []
    for first, count in runs:
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((first, count))
    return joined


def _first(runs: Runs, blocks: int) -> list[tuple[int, int]]:
    """The first so many blocks."""
    kept: list[tuple[int, int]] = []
    for first, count in runs:
        if blocks <= 0:
            break
        kept.append((first, min(count, blocks)))
        blocks -= count
    return kept


def _flat(prompts: list[list[tuple[int, int]]], answers: list[list[tuple[int, int]]]) -> tuple[Int64s, Int64s]:
    """All runs, [R, 2], prompt and answer in turns, and how many of them each of those has, [2 N]."""
    parts = list(itertools.chain.from_iterable(zip(prompts, answers, strict=True)))
    runs = np.array(list(itertools.chain.from_iterable(parts)), np.int64).reshape(-1, 2)
    return runs, np.array([len(part) for part in parts], np.int64)


class _Trie:
    """Of pieces: ids that follow each other, cut in front of every one of `edges`. Cuts too many do no harm.

    A recording may have an id in two places. Those are two nodes, as they are two blocks of a cache.
    """

    def __init__(self, edges: Int64s, runs: Int64s, counts: Int64s) -> None:
        self._edges = edges = np.unique(edges)
        low = np.searchsorted(edges, runs[:, 0])
        sizes = np.searchsorted(edges, runs.sum(axis=1)) - low
        pieces = np.repeat(low - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        ends = np.concatenate([[0], np.cumsum(sizes)])[np.concatenate([[0], np.cumsum(counts)])]
        self._starts, self._prompt_ends = ends[::2], ends[1::2]
        self._piece: list[int] = []
        self._parent: list[int] = []
        self._made_by: list[int] = []
        self._paths = self._walk(pieces.tolist())

    def _walk(self, pieces: list[int]) -> Int64s:
        """The nodes of all paths; parents are made first."""
        children: dict[int, int] = {}
        paths: list[int] = []
        num_pieces = len(self._edges)
        for request, (start, stop) in enumerate(itertools.pairwise(self._starts.tolist())):
            at = -1
            for piece in pieces[start:stop]:
                place = at * num_pieces + piece
                node = children.get(place)
                if node is None:
                    node = children[place] = len(self._piece)
                    self._piece.append(piece)
                    self._parent.append(at)
                    self._made_by.append(request)
                paths.append(node)
                at = node
        return np.array(paths, np.int64)

    def _prompt_last(self) -> tuple[Int64s, Bools]:
        """The node that each prompt ends with, of those that have one, and whether an earlier request had it."""
        requests = np.flatnonzero(self._prompt_ends > self._starts[:-1])
        nodes = self._paths[self._prompt_ends[requests] - 1]
        return nodes, np.array(self._made_by, np.int64)[nodes] < requests

    def repeated_ends(self) -> Int64s:
        """Ids of the last blocks of prompts that an earlier request had."""
        nodes, is_repeated = self._prompt_last()
        return np.unique(self._edges[np.array(self._piece, np.int64)[nodes[is_repeated]] + 1] - 1)

    def joined(self, arrivals_s: Float64s, ends_s: Float64s) -> Segments:
        """Nodes that nothing parts are one segment."""
        piece, above = np.array(self._piece, np.int64), np.array(self._parent, np.int64)
        sizes = self._edges[piece + 1] - self._edges[piece] if len(piece) else piece
        last, is_repeated = self._prompt_last()
        is_end = np.zeros(len(piece), np.bool_)
        is_end[last[is_repeated]] = True
        ends_here = np.bincount(above[above >= 0], minlength=len(piece)) != 1
        ends_here[last] = True
        ends_here[self._paths[self._starts[1:][self._starts[1:] > self._starts[:-1]] - 1]] = True
        ends_here[above[is_end & (above >= 0)]] = True

        segment: list[int] = []
        length: list[int] = []
        parent: list[int] = []
        depth: list[int] = []
        for upper, size, joins in zip(
            self._parent, sizes.tolist(), ((above >= 0) & ~ends_here[above]).tolist(), strict=True
        ):
            if joins:
                segment.append(segment[upper])
                length[segment[upper]] += size
                continue
            of = segment[upper] if upper >= 0 else -1
            parent.append(of)
            depth.append(depth[of] + length[of] if of >= 0 else 0)
            segment.append(len(length))
            length.append(size)
        segments = np.array(segment, np.int64)
        of_path = segments[self._paths]
        begins = np.ones(len(of_path), np.bool_)
        begins[1:] = of_path[1:] != of_path[:-1]
        begins[self._starts[:-1][self._starts[:-1] < self._starts[1:]]] = True
        before = np.concatenate([[0], np.cumsum(begins)])
        blocks = np.concatenate([[0], np.cumsum(sizes[self._paths])])
        is_repeated_end = np.zeros(len(length), np.bool_)
        is_repeated_end[segments[is_end]] = True
        return Segments(
            length=np.array(length, np.int64),
            parent=np.array(parent, np.int64),
            depth=np.array(depth, np.int64),
            is_repeated_end=is_repeated_end,
            paths=of_path[begins],
            starts=before[self._starts],
            prompt_ends=before[self._prompt_ends],
            prompt_blocks=blocks[self._prompt_ends] - blocks[self._starts[:-1]],
            arrivals_s=arrivals_s,
            ends_s=ends_s,
        )
