"""The copy loop: the helper compiled from ``_blockcopy.c`` when the package was built, or the same loop in Python."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from npu_copy._threads import Team
from npu_copy.plan import coalesce, split_runs

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_blockcopy.so")
_ABI = 4

# Copies every pair of blocks in every region, shared out in slices of so many (region, pair) items over a team's
# threads: (regions uint64 [r, 5], pairs int64 [n, 2], items a slice, team). The columns are those of _blockcopy.c.
BlockCopy = Callable[[np.ndarray, np.ndarray, int, Team], None]


@functools.cache
def load_block_copy(library: Path = LIBRARY) -> tuple[BlockCopy, str]:
    """The fastest copy loop this installation has, and its name ("native" or "memmove")."""
    try:
        helper = ctypes.CDLL(str(library))
        abi = helper.blockcopy_abi()
    except (OSError, AttributeError) as error:
        reason = str(error)
    else:
        if abi == _ABI:
            return _native(helper), "native"
        reason = f"it has ABI {abi}, not {_ABI}"
    logger.warning(
        "npu_copy: no compiled copy helper (%s); small blocks are copied at a fraction of memory speed. "
        "Reinstall with a C compiler at hand to build it.",
        reason,
    )
    return memmove_blocks, "memmove"


def _native(helper: ctypes.CDLL) -> BlockCopy:
    # CDLL calls release the GIL, so several threads copy at once and the engine's own thread goes on.
    copy, wait = helper.blockcopy, helper.blockcopy_wait
    copy.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 3, ctypes.c_void_p]
    wait.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    copy.restype = wait.restype = None

    def native_blocks(regions: np.ndarray, pairs: np.ndarray, per_slice: int, team: Team) -> None:
        items = len(regions) * len(pairs)
        progress = (ctypes.c_size_t * 2)()
        # Objects, not addresses: a helper that comes late still reads the progress.
        arguments = regions.ctypes, pairs.ctypes, len(pairs), items, per_slice, progress
        # One call a thread: taking the GIL for every slice would wait for whatever Python code holds it.
        team.run(min(team.num_threads, -(-items // per_slice)), lambda _: copy(*arguments), wait=False)
        wait(progress, items)

    return native_blocks


def memmove_blocks(regions: np.ndarray, pairs: np.ndarray, per_slice: int, team: Team) -> None:
    """One ``ctypes.memmove`` a piece: correct everywhere, near memory speed from about 256 KiB a piece."""
    runs = split_runs(coalesce(pairs), per_slice)

    def copy_slice(i: int) -> None:
        region, run = divmod(i, len(runs))
        _memmove_run(regions[region].tolist(), runs[run].tolist())

    team.run(len(regions) * len(runs), copy_slice)


def _memmove_run(region: list[int], run: list[int]) -> None:
    destination, source, destination_stride, source_stride, size = region
    source_block, destination_block, pieces = run
    destination += destination_block * destination_stride
    source += source_block * source_stride
    if source_stride == size and destination_stride == size:
        size, pieces = size * pieces, 1
    for _ in range(pieces):
        ctypes.memmove(destination, source, size)
        destination += destination_stride
        source += source_stride
