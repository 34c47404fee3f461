"""From (source block, destination block) pairs to what a backend copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npu_copy.direction import Direction
from npu_copy.host_pool import HostPool
from npu_copy.regions import Region

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

# Columns of Plan.regions, shared with _blockcopy.c, and of runs.
DESTINATION, SOURCE, DESTINATION_STRIDE, SOURCE_STRIDE, BLOCK_BYTES = range(5)
RUN_SOURCE, RUN_DESTINATION, RUN_COUNT = range(3)


@dataclass(frozen=True)
class Plan:
    """One job's copies: every pair of blocks, in every region."""

    direction: Direction
    regions: UInt64Array  # [num_regions, 5]: destination, source, their strides, block_bytes
    pairs: Int64Array  # [n, 2]: source block, destination block; in the order of the destinations
    nbytes: int

    @functools.cached_property
    def runs(self) -> Int64Array:
        """``[num_runs, 3]``: first source block, first destination block, blocks."""
        return coalesce(self.pairs)

    def pieces(self) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
        """Destination addresses, source addresses and sizes of all contiguous copies."""
        dense = (self.regions[:, DESTINATION_STRIDE] == self.regions[:, BLOCK_BYTES]) & (
            self.regions[:, SOURCE_STRIDE] == self.regions[:, BLOCK_BYTES]
        )
        parts = [_pieces(self.regions[dense], self.runs)]
        if not dense.all():
            parts.append(_pieces(self.regions[~dense], split_runs(self.runs, 1)))
        destinations, sources, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return destinations, sources, sizes


class Planner:
    """Checks pairs and turns them into plans, for one set of regions and one host pool."""

    def __init__(self, regions: Sequence[Region], host_pool: HostPool) -> None:
        if not regions:
            raise ValueError("regions is empty: pass what find_regions returned")
        wanted = [r.block_bytes for r in regions]
        if wanted != host_pool.block_bytes:
            raise ValueError(f"the host pool was allocated for other regions: {host_pool.block_bytes} against {wanted}")
        self.device_blocks = regions[0].num_blocks
        self.host_blocks = host_pool.num_blocks
        self.block_bytes = sum(wanted)
        device = [(r.address, r.block_stride) for r in regions]
        host = [(a, b) for a, b in zip(host_pool.addresses, wanted, strict=True)]
        self._regions = {
            Direction.STORE: _region_table(host, device, wanted),
            Direction.LOAD: _region_table(device, host, wanted),
        }

    def plan(self, pairs: npt.ArrayLike, direction: Direction) -> Plan:
        """Plan a job. ``pairs`` is int64 ``[n, 2]``: source block, destination block.

        Raises:
            ValueError: wrong shape or type, a block id out of range, the null block, a destination twice.
        """
        pairs = np.asarray(pairs)
        if pairs.size == 0:
            pairs = np.empty((0, 2), np.int64)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
            raise ValueError(f"pairs must be integers [n, 2], got {pairs.dtype} {list(pairs.shape)}")
        if not isinstance(direction, Direction):
            raise ValueError(f"direction must be Direction.STORE or Direction.LOAD, got {direction!r}")
        pairs = pairs.astype(np.int64, copy=False)
        sides = [("device", self.device_blocks), ("host", self.host_blocks)]
        if direction is Direction.LOAD:
            sides.reverse()
        for role, (side, num_blocks), ids in zip(("source", "destination"), sides, pairs.T, strict=True):
            _check_range(ids, num_blocks, f"{role} {side} block")
        pairs = pairs.take(pairs[:, 1].argsort(), axis=0)
        _check_distinct(pairs[:, 1], f"destination {sides[1][0]} block")
        return Plan(direction, self._regions[direction], pairs, len(pairs) * self.block_bytes)

    def null_block_plan(self) -> Plan:
        """A store of the null block, whose content means nothing on either side."""
        pairs = np.zeros((1, 2), np.int64)
        return Plan(Direction.STORE, self._regions[Direction.STORE], pairs, self.block_bytes)


def coalesce(pairs: Int64Array) -> Int64Array:
    """Runs ``[num_runs, 3]`` of blocks consecutive on both sides, from pairs in the order of their destinations."""
    bounds = np.ones(len(pairs) + 1, bool)
    step = pairs[1:] - pairs[:-1]
    np.logical_or(step[:, 0] != 1, step[:, 1] != 1, out=bounds[1:-1])
    starts = bounds.nonzero()[0]
    runs = np.empty((len(starts) - 1, 3), np.int64)
    runs[:, :RUN_COUNT] = pairs[starts[:-1]]
    np.subtract(starts[1:], starts[:-1], out=runs[:, RUN_COUNT])
    return runs


def split_runs(runs: Int64Array, most: int) -> Int64Array:
    """The same blocks in runs of at most ``most`` blocks."""
    if len(runs) == 0 or runs[:, RUN_COUNT].max() <= most:
        return runs
    parts = -(-runs[:, RUN_COUNT] // most)
    split = np.repeat(runs, parts, axis=0)
    # Index of each part within its run.
    offset = (np.arange(len(split)) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    split[:, RUN_SOURCE] += offset
    split[:, RUN_DESTINATION] += offset
    split[:, RUN_COUNT] = np.minimum(split[:, RUN_COUNT] - offset, most)
    return split


def _region_table(destination: list[tuple[int, int]], source: list[tuple[int, int]], sizes: list[int]) -> UInt64Array:
    rows = [(d, s, ds, ss, n) for (d, ds), (s, ss), n in zip(destination, source, sizes, strict=True)]
    return np.array(rows, np.uint64)


def _pieces(regions: UInt64Array, runs: Int64Array) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Every run in every region as one piece each, region by region."""
    columns = runs.astype(np.uint64)

    def addresses(base: int, stride: int, block: int) -> UInt64Array:
        return (regions[:, base, None] + columns[None, :, block] * regions[:, stride, None]).ravel()

    sizes = (regions[:, BLOCK_BYTES, None] * columns[None, :, RUN_COUNT]).ravel()
    return (
        addresses(DESTINATION, DESTINATION_STRIDE, RUN_DESTINATION),
        addresses(SOURCE, SOURCE_STRIDE, RUN_SOURCE),
        sizes,
    )


def _check_range(ids: Int64Array, num_blocks: int, what: str) -> None:
    if len(ids) and (ids.min() < 1 or ids.max() >= num_blocks):
        bad = int(ids[(ids < 1) | (ids >= num_blocks)][0])
        if bad == 0:
            raise ValueError(f"{what} 0 is the null block, which is never copied: leave its pair out")
        raise ValueError(f"{what} {bad} is out of range: must be in [1, {num_blocks})")


def _check_distinct(ordered: Int64Array, what: str) -> None:
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        bad = int(ordered[1:][twice][0])
        raise ValueError(f"{what} {bad} appears more than once: each can be written once a job")
