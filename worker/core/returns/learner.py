"""What rank 0 learns of who comes back, and the tables that it makes of it.

Of each class and bucket of ages: how often conversations returned then, and for how long they were seen idle. Time
without a return counts, so what has not returned yet is not taken for what never will (the occurrence-exposure rate;
Kaplan and Meier, 1958, for the censoring). A class of which little was seen is drawn to the coarser one that it is in
by PSEUDO_RETURNS, and all together to a hazard of PRIOR_HAZARD / age, under which order is that of `lru`.

A row's values are an index as Gittins has it (Gittins 1979; Aalto, Ayesta and Righter 2009 for the quotient below):
the best, over horizons, of the chance to return until then for each second that the blocks are held.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from worker.core.returns.ages import EDGES_MS, NUM_BUCKETS, bucket_of
from worker.core.returns.classes import EVERYBODY, levels
from worker.core.returns.index import Idle
from worker.core.returns.tables import LEAST, MOST

PSEUDO_RETURNS = 0.5
PRIOR_RETURNS = 4.0
PRIOR_HAZARD = 0.5
SMALLEST_INDEX = 1e-9
"""Per second, worth LEAST; values are 1000 a factor of ten."""

Floats = npt.NDArray[np.float64]

_EDGES_S = np.array(EDGES_MS) / 1000
_WIDTHS_S = np.append(np.diff(_EDGES_S), _EDGES_S[-1])
_MIDDLES_S = np.sqrt(_EDGES_S * (_EDGES_S + _WIDTHS_S))
_MIDDLES_S[0] = _EDGES_S[1] / 2


class Learner:
    """Watches the index of rank 0's replica."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._returns = np.zeros((16, NUM_BUCKETS))
        self._idle_s = np.zeros((16, NUM_BUCKETS))

    def idled(self, group: int, from_ms: int, to_ms: int) -> None:
        """A conversation of this class was idle from one age to another."""
        row = self._row(group)
        _spread(self._idle_s[row], from_ms, to_ms)

    def returned(self, group: int, age_ms: int) -> None:
        """One came back at this age."""
        row = self._row(group)
        self._returns[row, bucket_of(age_ms)] += 1

    def _row(self, group: int) -> int:
        row = self._rows.get(group)
        if row is None:
            row = self._rows[group] = len(self._rows)
            if row == len(self._returns):
                self._returns = np.concatenate([self._returns, np.zeros_like(self._returns)])
                self._idle_s = np.concatenate([self._idle_s, np.zeros_like(self._idle_s)])
        return row

    def rows(self, idle: Iterable[Idle]) -> dict[int, tuple[int, ...]]:
        """A row of values for each class that was seen, and EVERYBODY's. `idle`: who is, of whom not all was told."""
        fresh = [(self._row(one.group), one) for one in idle]
        idle_s = self._idle_s.copy()
        for row, one in fresh:
            _spread(idle_s[row], one.from_ms, one.to_ms)
        hazards = self._hazards(idle_s)
        values = _values(np.array(list(hazards.values())))
        return {group: tuple(row) for group, row in zip(hazards, values.tolist(), strict=True)}

    def _hazards(self, idle_s: Floats) -> dict[int, Floats]:
        """Returns per second idle, by class and bucket."""
        seen = {group: (self._returns[row], idle_s[row]) for group, row in self._rows.items() if idle_s[row].any()}
        summed: dict[int, tuple[Floats, Floats]] = {}
        for group, (returns, seconds) in seen.items():
            for level in levels(group):
                if level in summed:
                    summed[level] = summed[level][0] + returns, summed[level][1] + seconds
                else:
                    summed[level] = returns, seconds
        zero = np.zeros(NUM_BUCKETS)
        everybody = _drawn(
            sum((returns for returns, _ in seen.values()), zero),
            sum((seconds for _, seconds in seen.values()), zero),
            PRIOR_HAZARD / _MIDDLES_S,
            PRIOR_RETURNS,
        )
        at: dict[int, Floats] = {}
        hazards = {EVERYBODY: everybody}
        for group in seen:
            coarser = everybody
            for level in levels(group):
                if level not in at:
                    at[level] = _drawn(*summed[level], coarser, PSEUDO_RETURNS)
                coarser = at[level]
            hazards[group] = coarser
        return hazards


def _drawn(returns: Floats, seconds: Floats, coarser: Floats, weight: float) -> Floats:
    """The hazard, as if `weight` returns at the coarser hazard had been seen as well."""
    return (returns + weight) / (seconds + weight / coarser)


def _spread(seconds: Floats, from_ms: int, to_ms: int) -> None:
    """Add the time between two ages to the buckets that it falls into."""
    first, last = bucket_of(from_ms), bucket_of(to_ms)
    if first == last:
        seconds[first] += (to_ms - from_ms) / 1000
        return
    seconds[first] += (EDGES_MS[first + 1] - from_ms) / 1000
    seconds[first + 1 : last] += _WIDTHS_S[first + 1 : last]
    seconds[last] += (to_ms - EDGES_MS[last]) / 1000


def _values(hazards: Floats) -> npt.NDArray[np.int64]:
    """The index of each row of hazards from the middle of each bucket on, as whole numbers."""
    best = np.empty_like(hazards)
    through = hazards * _WIDTHS_S
    for bucket in range(NUM_BUCKETS):
        steps = through[:, bucket:].copy()
        steps[:, 0] /= 2
        left = np.exp(-np.cumsum(steps, axis=1))
        before = np.concatenate([np.ones((len(left), 1)), left[:, :-1]], axis=1)
        held_s = np.cumsum((before - left) / hazards[:, bucket:], axis=1)
        best[:, bucket] = np.max((1 - left) / held_s, axis=1)
    values = np.rint(1000 * np.log10(best / SMALLEST_INDEX))
    return np.asarray(np.clip(values, LEAST, MOST), np.int64)
