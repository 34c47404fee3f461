"""The copy engine: jobs in, results out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt

from npu_copy.backends import Backend, Copy, make_backend
from npu_copy.direction import Direction
from npu_copy.host_pool import HostPool
from npu_copy.plan import Planner
from npu_copy.regions import Region


@dataclass(frozen=True)
class CopyResult:
    """A finished job. ``error`` is what stopped it; the destination blocks then hold anything."""

    job: int
    direction: Direction
    nbytes: int
    seconds: float
    error: BaseException | None = None


@dataclass(frozen=True)
class _Job:
    job: int
    direction: Direction
    nbytes: int
    copy: Copy


class CopyEngine:
    """Moves blocks between ``regions`` on the device and ``host_pool``.

    Jobs of one direction finish, and are reported, in the order they were submitted. Call it from any thread; the
    compute stream is the one current on the thread that calls :meth:`submit`.
    """

    def __init__(self, regions: Sequence[Region], host_pool: HostPool, backend: str | None = None) -> None:
        """Make an engine. ``backend`` is "cpu", "cuda" or "npu"; default: by the regions' device.

        Raises:
            ValueError: regions and pool do not belong together; an unknown backend.
        """
        self._planner = Planner(regions, host_pool)
        self._host_pool = host_pool
        self._backend: Backend = make_backend(backend or regions[0].device.type, regions, host_pool)
        self._lock = threading.Lock()
        self._jobs: dict[Direction, deque[_Job]] = {direction: deque() for direction in Direction}
        self._closed = False

    @property
    def backend(self) -> str:
        """Name of the backend and of the path it copies by, such as ``"cpu (native)"``."""
        return f"{self._backend.name} ({self._backend.path})"

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet reported by :meth:`poll`."""
        with self._lock:
            return sum(map(len, self._jobs.values()))

    def submit(self, job: int, pairs: npt.ArrayLike, direction: Direction, *, block_compute: bool = False) -> None:
        """Start copying blocks.

        STORE waits for the compute stream's work so far, and the compute stream waits for it: what is launched next
        may overwrite the blocks. LOAD waits for the compute stream's work so far; nothing waits for it but its job,
        unless ``block_compute``: then the compute stream does. On the CPU, what the compute stream would wait for is
        done when this returns.

        Args:
            job: an id that no unreported job has.
            pairs: int64 ``[n, 2]``: source block, destination block. May be empty.
            block_compute: see above; a STORE always blocks the compute stream.

        Raises:
            ValueError: a block id out of range, the null block 0, a destination twice, a job id in use.
            RuntimeError: the engine or its host pool is closed.
        """
        plan = self._planner.plan(pairs, direction)
        blocks = block_compute or direction is Direction.STORE
        with self._lock:
            if self._closed:
                raise RuntimeError(f"job {job}: the copy engine is closed")
            if self._host_pool.closed:
                raise RuntimeError(f"job {job}: the host pool is closed; close the engine before its pool")
            if self._find(job) is not None:
                raise ValueError(f"job {job} is already submitted and not yet reported by poll()")
            copy = self._backend.start(plan, background=not blocks)
            self._jobs[direction].append(_Job(job, direction, plan.nbytes, copy))
        if blocks:
            copy.block_compute()

    def poll(self) -> list[CopyResult]:
        """Jobs that really finished since the last call, failed ones too, each once; never waits."""
        results = []
        with self._lock:
            for jobs in self._jobs.values():
                while jobs and jobs[0].copy.done():
                    done = jobs.popleft()
                    seconds, error = done.copy.outcome()
                    results.append(CopyResult(done.job, done.direction, done.nbytes, seconds, error))
        return results

    def wait(self, job: int, timeout: float) -> None:
        """Wait until ``job`` has finished or failed; :meth:`poll` then reports it.

        Raises:
            TimeoutError: it did not within ``timeout`` seconds; it goes on.
            ValueError: no such job, or poll reported it already.
        """
        with self._lock:
            found = self._find(job)
        if found is None:
            raise ValueError(f"job {job} was never submitted, or poll() has reported it")
        if not found.copy.wait(timeout):
            raise TimeoutError(f"{found.direction.value} job {job} ({found.nbytes} bytes) not done in {timeout} s")

    def close(self, timeout: float = 60.0) -> None:
        """Take no more jobs, wait for those running and free the backend. Results can still be polled.

        Raises:
            TimeoutError: jobs were still running after ``timeout`` seconds. Their memory must stay; call again.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            jobs = [job for queue in self._jobs.values() for job in queue]
        late = [j.job for j in jobs if not j.copy.wait(max(0.0, deadline - time.monotonic()))]
        if late:
            raise TimeoutError(f"copy jobs {late} still running after {timeout} s")
        self._backend.close()

    def _find(self, job: int) -> _Job | None:
        return next((j for queue in self._jobs.values() for j in queue if j.job == job), None)
