"""Copies between CPU tensors and the host pool, by several threads."""

from __future__ import annotations

import logging
import queue
import threading
import time

from npu_copy._native import load_block_copy
from npu_copy._threads import Team
from npu_copy.direction import Direction
from npu_copy.plan import Plan

logger = logging.getLogger(__name__)

# Bytes a thread takes at a time: from where waking another thread saves more than it costs, to where the cost of taking
# a slice is lost in the copy.
_SLICE_BYTES = (256 << 10, 4 << 20)
_SLICES_A_THREAD = 8
# A copy of host memory that takes longer than this is stuck.
_SYNC_TIMEOUT_S = 600.0


class _Done:
    """A job's copies, finished by whichever thread runs them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def block_compute(self) -> None:
        if not self.wait(_SYNC_TIMEOUT_S):
            raise TimeoutError(f"a copy of {self.plan.nbytes} bytes did not finish in {_SYNC_TIMEOUT_S} s")

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout: float) -> bool:
        return self.finished.wait(timeout)

    def outcome(self) -> tuple[float, BaseException | None]:
        return self.seconds, self.error


class CpuBackend:
    """Stores run in the caller; loads on one background thread, in order. Both share the team's threads.

    A load that the caller would wait for runs in the caller too, unless others are before it.
    """

    name = "cpu"

    def __init__(self, team: Team) -> None:
        self._team = team
        self._copy, self.path = load_block_copy()
        self._loads: queue.SimpleQueue[_Done | None] = queue.SimpleQueue()
        self._last_load: _Done | None = None
        self._loader = threading.Thread(target=self._run_loads, name="npu_copy load", daemon=True)
        self._loader.start()
        logger.info("npu_copy: cpu backend, %s copies, %d threads", self.path, team.num_threads)

    def start(self, plan: Plan, *, background: bool) -> _Done:
        copy = _Done(plan)
        if plan.direction is Direction.STORE or (not background and self._idle()):
            self._run(copy)
        else:
            self._last_load = copy
            self._loads.put(copy)
        return copy

    def _idle(self) -> bool:
        return self._last_load is None or self._last_load.done()

    def close(self) -> None:
        self._loads.put(None)
        self._loader.join(_SYNC_TIMEOUT_S)

    def _run_loads(self) -> None:
        while (copy := self._loads.get()) is not None:
            self._run(copy)

    def _run(self, copy: _Done) -> None:
        start = time.perf_counter()
        try:
            self._copy_blocks(copy.plan)
        except Exception as error:
            copy.error = error
        copy.seconds = time.perf_counter() - start
        copy.finished.set()

    def _copy_blocks(self, plan: Plan) -> None:
        if plan.nbytes == 0:
            return
        least, most = _SLICE_BYTES
        slice_bytes = min(most, max(least, plan.nbytes // (_SLICES_A_THREAD * self._team.num_threads)))
        items = len(plan.regions) * len(plan.pairs)
        per_slice = max(1, items * slice_bytes // plan.nbytes)
        self._copy(plan.regions, plan.pairs, per_slice, self._team)
