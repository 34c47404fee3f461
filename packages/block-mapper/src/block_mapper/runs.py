"""Pairs of blocks to runs of blocks, and runs to byte spans."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def run_starts(*columns: Int64Array) -> Int64Array:
    """Indices where a run starts: everywhere but where each column rises by exactly 1. Columns int64 [n]."""
    breaks = np.zeros(len(columns[0]), dtype=bool)
    breaks[:1] = True
    for column in columns:
        breaks[1:] |= np.diff(column) != 1
    return np.flatnonzero(breaks)


def coalesce(pairs: Int64Array) -> Int64Array:
    """Maximal runs of block pairs: int64 [n, 2] (source, destination) -> int64 [m, 3] (source, destination, length).

    Pairs of one job may be copied in any order, so they are sorted by source first: a run is where both ids rise
    by 1. Runs come in rising order of source. ValueError when the shape is another.
    """
    pairs = np.asarray(pairs, dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs has shape {pairs.shape}: give int64 [n, 2] (source, destination)")
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    starts = run_starts(pairs[:, 0], pairs[:, 1])
    lengths = np.diff(starts, append=len(pairs))
    return np.column_stack((pairs[starts], lengths))


def byte_spans(runs: Int64Array, block_bytes: int, source_stride: int, destination_stride: int) -> Int64Array:
    """Runs in one memory region as byte copies: int64 [k, 3] (source offset, destination offset, bytes).

    runs: int64 [m, 3] from coalesce. block_bytes: bytes of a block to copy. Strides: bytes from one block to the
    next on each side, at least block_bytes. A run is one copy where the blocks touch on both sides (both strides
    equal block_bytes), else one copy a block.
    """
    if block_bytes < 1 or min(source_stride, destination_stride) < block_bytes:
        raise ValueError(
            f"block_bytes {block_bytes}, source_stride {source_stride}, destination_stride {destination_stride}: "
            "strides must be at least block_bytes, and block_bytes at least 1"
        )
    source, destination, length = np.asarray(runs, dtype=np.int64).reshape(-1, 3).T
    if not source_stride == destination_stride == block_bytes:
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        source, destination = np.repeat(source, length) + within, np.repeat(destination, length) + within
        length = np.ones_like(source)
    return np.column_stack((source * source_stride, destination * destination_stride, length * block_bytes))
