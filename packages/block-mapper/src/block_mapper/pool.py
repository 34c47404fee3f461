"""Host blocks: who holds each of them, and which blocks hold a prefix that others may share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from block_mapper.free_runs import FreeRuns
from block_mapper.runs import Int64Array

NULL_BLOCK = 0


class HostPoolFull(RuntimeError):
    """Fewer host blocks than needed. needed: blocks asked for; free: blocks that could be had, cached ones included."""

    def __init__(self, needed: int, free: int):
        super().__init__(f"{needed} host blocks needed, {free} free: raise the host memory budget or use the fallback")
        self.needed = needed
        self.free = free


@dataclass(frozen=True)
class PoolUsage:
    """Blocks of the pool without the null block: total == used + cached + free. high_water: most ever used at once."""

    total: int
    used: int
    cached: int
    free: int
    high_water: int


class HostPool:
    """num_blocks usable host blocks with ids 1 .. num_blocks. Id 0 is the null block, never handed out.

    A block is free, or used (its reference count is above 0), or cached: without a holder, but published under a key
    and ready to be shared, until its memory is needed (least recently freed first). With log_changes, take_changes
    tells what was published and what can be found no more.
    """

    def __init__(self, num_blocks: int, log_changes: bool = False):
        if not isinstance(num_blocks, Integral):
            raise TypeError(f"num_blocks is {num_blocks!r}: write a whole number of host blocks")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: the host memory budget must hold at least one block")
        self.num_blocks = num_blocks
        self.refs: Int64Array = np.zeros(num_blocks + 1, np.int64)
        self._free = FreeRuns(1, num_blocks)
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes: list[tuple[Hashable, bool]] | None = [] if log_changes else None
        self._high_water = 0

    def allocate(self, n: int) -> Int64Array:
        """n block ids, rising, each with one reference: all of them, or HostPoolFull and nothing changed."""
        if n < 0:
            raise ValueError(f"n is {n}: ask for 0 blocks or more")
        if n > self._free.count + len(self._cached):
            raise HostPoolFull(n, self._free.count + len(self._cached))
        short = n - self._free.count
        if short > 0:
            oldest = np.array([self._cached.popitem(last=False)[0] for _ in range(short)], np.int64)
            self._forget(oldest)
            self._free.put(oldest)
        ids = self._free.take(n)
        self.refs[ids] = 1
        self._note_high_water()
        return ids

    def retain(self, ids: Int64Array) -> None:
        """One more reference to each of ids (used or cached blocks)."""
        for block in ids[self.refs[ids] == 0].tolist():
            if block not in self._cached:
                raise ValueError(f"host block {block} is not in use: only used or cached blocks can be retained")
        for block in ids[self.refs[ids] == 0].tolist():
            del self._cached[block]
        self.refs[ids] += 1
        self._note_high_water()

    def free(self, ids: Int64Array) -> None:
        """One reference less to each of ids (distinct). Without a holder left, a published block is cached, others
        return to the free list."""
        if (self.refs[ids] < 1).any():
            raise ValueError(f"host blocks {ids[self.refs[ids] < 1].tolist()} are not in use: freed twice?")
        self.refs[ids] -= 1
        unheld = ids[self.refs[ids] == 0]
        if self._key_of:
            published = np.fromiter((block in self._key_of for block in unheld.tolist()), bool, len(unheld))
            # The tail of a prefix is worth less than its head, so it is the first to be evicted.
            self._cached.update(dict.fromkeys(unheld[published][::-1].tolist()))
            unheld = unheld[~published]
        self._free.put(unheld)

    def publish(self, keys: Sequence[Hashable], blocks: Int64Array) -> None:
        """Let each used block be found under its key. One block per key, one key per block; both distinct."""
        ids = blocks.tolist()
        taken = not self._block_of.keys().isdisjoint(keys) or not self._key_of.keys().isdisjoint(ids)
        if taken or (self.refs[blocks] < 1).any():
            raise ValueError(f"host blocks {ids} cannot be published: one is unused, or has a key, or its key is taken")
        self._block_of.update(zip(keys, ids, strict=True))
        self._key_of.update(zip(ids, keys, strict=True))
        if self._changes is not None:
            self._changes += [(key, True) for key in keys]

    def lookup(self, keys: Sequence[Hashable]) -> Int64Array:
        """The block published under each key, the null block where there is none. A pure query."""
        return np.array([self._block_of.get(key, NULL_BLOCK) for key in keys], np.int64)

    def unpublish(self, ids: Int64Array | None = None) -> None:
        """Let these blocks (None: all) be found no more; those that were only cached become free."""
        if ids is None:
            ids = np.array(list(self._key_of), np.int64)
        self._forget(ids)
        cached = [block for block in ids.tolist() if block in self._cached]
        for block in cached:
            del self._cached[block]
        self._free.put(np.array(cached, np.int64))

    def take_changes(self) -> list[tuple[Hashable, bool]]:
        """(key, whether it was published or can be found no more) since the last call, in order; with log_changes."""
        if self._changes is None:
            raise ValueError("changes are not logged: make the pool with log_changes=True")
        changes, self._changes = self._changes, []
        return changes

    def usage(self) -> PoolUsage:
        used = self._used()
        return PoolUsage(self.num_blocks, used, len(self._cached), self._free.count, self._high_water)

    def _used(self) -> int:
        return self.num_blocks - self._free.count - len(self._cached)

    def _note_high_water(self) -> None:
        self._high_water = max(self._high_water, self._used())

    def _forget(self, ids: Int64Array) -> None:
        for block in ids.tolist():
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                if self._changes is not None:
                    self._changes.append((key, False))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is exactly one of free, cached and used."""
        self._free.check_integrity()
        owners = np.zeros(self.num_blocks + 1, np.int64)
        owners[self._free.ids()] += 1
        owners[list(self._cached)] += 1
        owners += self.refs > 0
        assert owners[NULL_BLOCK] == 0, "the null block is in the pool"
        assert (owners[1:] == 1).all(), f"blocks lost or owned twice: {np.flatnonzero(owners[1:] != 1) + 1}"
        assert (self.refs >= 0).all(), "negative reference count"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "prefix index out of step"
        assert self._cached.keys() <= self._key_of.keys(), "a cached block cannot be found"
        assert self._used() <= self._high_water <= self.num_blocks, "high-water mark below use"
