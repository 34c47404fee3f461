"""The free list of the host pool, kept as runs of neighbouring block ids."""

from __future__ import annotations

import numpy as np

from block_mapper.runs import Int64Array, run_starts


class FreeRuns:
    """Free block ids as disjoint runs [start, start + length), sorted, never touching each other.

    Neighbouring host blocks become one copy, so a request gets one run where there is one, and as few as possible
    otherwise. Cost: linear in the blocks asked for plus the number of runs, all inside numpy.
    """

    def __init__(self, first: int, count: int):
        self.starts: Int64Array = np.array([first], np.int64)
        self.lengths: Int64Array = np.array([count], np.int64)
        self.count = count

    def take(self, n: int) -> Int64Array:
        """Remove n <= count ids and return them in rising order: the tightest run that fits, else the longest runs."""
        if n == 0:
            return np.empty(0, np.int64)
        fits = np.flatnonzero(self.lengths >= n)
        if fits.size:
            chosen = fits[np.argmin(self.lengths[fits])][None]
        else:
            longest = np.argsort(-self.lengths, kind="stable")
            enough = int(np.searchsorted(np.cumsum(self.lengths[longest]), n)) + 1
            chosen = longest[:enough]
        taken = self.lengths[chosen]
        taken[-1] -= taken.sum() - n
        ids = np.repeat(self.starts[chosen] - np.cumsum(taken) + taken, taken) + np.arange(n)
        self.starts[chosen] += taken
        self.lengths[chosen] -= taken
        left = self.lengths > 0
        self.starts, self.lengths = self.starts[left], self.lengths[left]
        self.count -= n
        return np.sort(ids)

    def put(self, ids: Int64Array) -> None:
        """Give back ids, distinct and none of them free."""
        ids = np.sort(ids)
        begins = run_starts(ids)
        at = np.searchsorted(self.starts, ids[begins])
        starts = np.insert(self.starts, at, ids[begins])
        lengths = np.insert(self.lengths, at, np.diff(begins, append=len(ids)))
        touches = np.zeros(len(starts), dtype=bool)
        touches[1:] = starts[1:] == starts[:-1] + lengths[:-1]
        heads = np.flatnonzero(~touches)
        self.starts = starts[heads]
        self.lengths = np.add.reduceat(lengths, heads) if len(heads) else lengths
        self.count += len(ids)

    def ids(self) -> Int64Array:
        """All free ids in rising order."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.repeat(self.starts - before, self.lengths) + np.arange(self.lengths.sum())

    def check_integrity(self) -> None:
        """Raise AssertionError where runs are empty, out of order, overlapping or touching."""
        assert (self.lengths > 0).all(), f"empty free run: lengths {self.lengths}"
        assert (self.starts[1:] > self.starts[:-1] + self.lengths[:-1]).all(), "free runs overlap or touch"
        assert self.lengths.sum() == self.count, f"{self.lengths.sum()} ids in free runs, {self.count} counted"
