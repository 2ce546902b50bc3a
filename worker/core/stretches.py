"""Who owns which blocks of a run: kept per stretch, as a run is made of few conversations."""

from __future__ import annotations

from collections.abc import Iterator


class Stretches:
    """Covers the blocks [0, length) of a run; each stretch begins at a block and has one owner, "" for nobody."""

    __slots__ = ("_owners", "_starts")

    def __init__(self, owner: str) -> None:
        self._starts = [0]
        self._owners = [owner]

    def extend(self, start: int, owner: str) -> None:
        """Blocks from `start`, the run's length so far, belong to `owner`."""
        if self._owners[-1] != owner:
            self._starts.append(start)
            self._owners.append(owner)

    def split(self, length: int) -> Stretches:
        """Keep the first `length` blocks; returns the stretches of the rest, counted from there."""
        first = self._index(length)
        rest = Stretches(self._owners[first])
        rest._starts += [start - length for start in self._starts[first + 1 :]]
        rest._owners += self._owners[first + 1 :]
        self.trim(length)
        return rest

    def trim(self, length: int) -> None:
        """Keep the first `length` blocks, at least one."""
        stop = self._index(length - 1) + 1
        del self._starts[stop:], self._owners[stop:]

    def of_length(self, length: int) -> Iterator[tuple[int, int, str]]:
        """(start, stop, owner) of each stretch of a run with `length` blocks."""
        yield from zip(self._starts, [*self._starts[1:], length], self._owners, strict=True)

    def owners(self) -> set[str]:
        return set(self._owners)

    def _index(self, block: int) -> int:
        """Which stretch `block` lies in."""
        return next(index for index in range(len(self._starts) - 1, -1, -1) if self._starts[index] <= block)
