"""A few threads that share out slices of one piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# More threads than this gain nothing: a few saturate a memory channel group, and other ranks want cores too.
_MAX_DEFAULT = 4

_sched_getcpu = ctypes.CDLL(None).sched_getcpu


class Team:
    """``num_threads`` threads; the caller's thread is one of them."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(_MAX_DEFAULT, len(os.sched_getaffinity(0)))
        if num_threads < 1:
            raise ValueError(f"threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._cpus = os.sched_getaffinity(0)
        self._helpers: list[int] = []
        self._kept_off: tuple[int, int] | None = None
        self._executor = ThreadPoolExecutor(num_threads - 1, "npu_copy", self._join) if num_threads > 1 else None

    def run(self, num_slices: int, work: Callable[[int], None], *, wait: bool = True) -> None:
        """Call ``work(i)`` for ``0 <= i < num_slices`` and return when all calls have; raise the first error.

        Without ``wait``, return when the caller has no call left to make: ``work`` cannot fail, and the caller has its
        own way to wait for what the helpers are at.
        """
        # Slices are handed out one by one: a thread that the system suspends does not hold up the rest.
        counter = itertools.count()

        def take() -> None:
            while (i := next(counter)) < num_slices:
                work(i)

        helpers = min(self.num_threads, num_slices) - 1
        if helpers > 0:
            self._keep_off_this_cpu()
        futures = [self._executor.submit(take) for _ in range(helpers)] if self._executor else []
        try:
            take()
        finally:
            # A helper that has not even started has nothing left to do.
            begun = [future for future in futures if not future.cancel()]
            errors = [error for future in begun if wait and (error := future.exception())]
        if errors:
            raise errors[0]

    def _join(self) -> None:
        self._helpers.append(threading.get_native_id())

    def _keep_off_this_cpu(self) -> None:
        """Let the helpers run anywhere but where the caller does.

        Linux likes to wake a thread where it last ran, or beside whoever woke it. On the caller's CPU it begins when
        the caller's own slices are done, and a job of few MiB has gained nothing from it.
        """
        here = _sched_getcpu(), len(self._helpers)
        if here == self._kept_off:
            return
        self._kept_off = here
        if others := self._cpus - {here[0]}:
            for helper in self._helpers:
                # Some containers forbid it, and the CPUs that a process may use can shrink: it helps, no more.
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(helper, others)

    def close(self) -> None:
        if self._executor:
            self._executor.shutdown()
