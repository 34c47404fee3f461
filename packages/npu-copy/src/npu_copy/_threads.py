"""A few threads that share out slices of one piece of work."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# More threads than this gain nothing: a few saturate a memory channel group, and other ranks want cores too.
_MAX_DEFAULT = 4


class Team:
    """``num_threads`` threads; the caller's thread is one of them."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(_MAX_DEFAULT, len(os.sched_getaffinity(0)))
        if num_threads < 1:
            raise ValueError(f"threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads - 1, "npu_copy") if num_threads > 1 else None

    def run(self, num_slices: int, work: Callable[[int], None]) -> None:
        """Call ``work(i)`` for ``0 <= i < num_slices`` and return when all calls have; raise the first error."""
        # Slices are handed out one by one: a thread that the system suspends does not hold up the rest.
        counter = itertools.count()

        def take() -> None:
            while (i := next(counter)) < num_slices:
                work(i)

        helpers = min(self.num_threads, num_slices) - 1
        futures = [self._executor.submit(take) for _ in range(helpers)] if self._executor else []
        try:
            take()
        finally:
            # A helper that has not even started has nothing left to do.
            errors = [error for future in futures if not future.cancel() and (error := future.exception())]
        if errors:
            raise errors[0]

    def close(self) -> None:
        if self._executor:
            self._executor.shutdown()
