"""npu-copy's path to a simulated device: real bytes, moved piece by piece at virtual times, and sometimes failing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import numpy as np
import torch

import npu_copy.backends.stream
import npu_copy.engine
from npu_copy import Direction
from npu_copy.backends.stream import StreamBackend
from npu_copy.plan import RUN_COUNT, RUN_DESTINATION, RUN_SOURCE, Plan
from pd_integration.sim.clock import Clock, DeviceModule, Stream
from pd_integration.sim.memory import POISON, BlockCopy, RankMemory


class CopyFailed(RuntimeError):
    """A copy that a failing device gave up."""


class SimulatedPath:
    """A CopyPath (npu_copy.backends.stream) of one rank.

    Args:
        memory: the rank's.
        random: decides how long copies take and in which order pieces move.
        seconds: direction to typical virtual seconds of one job.
        fails: asked once a job, whether it fails.
    """

    name = "simulated"

    def __init__(
        self,
        memory: RankMemory,
        random: Random,
        seconds: dict[Direction, float],
        fails: Callable[[Direction], bool],
    ) -> None:
        self._memory = memory
        self._random = random
        self._seconds = seconds
        self._fails = fails

    def queue(self, plan: Plan, stream: Stream) -> object:
        is_store = plan.direction is Direction.STORE
        sources, destinations = _blocks(plan, RUN_SOURCE), _blocks(plan, RUN_DESTINATION)
        device, host = (sources, destinations) if is_store else (destinations, sources)
        copy = BlockCopy(is_store, self._memory.next_order(), frozenset(device), frozenset(host))
        self._memory.begin_copy(copy)
        pieces = list(zip(*(column.tolist() for column in plan.pieces()), strict=True))
        self._random.shuffle(pieces)
        seconds = self._seconds[plan.direction] * self._random.choice((0.1, 0.3, 1.0, 1.0, 3.0))
        fails = bool(pieces) and self._fails(plan.direction)
        if fails:
            del pieces[self._random.randrange(len(pieces)) :]

        # Start, three moments at which pieces move, and the end.
        share = -(-max(1, len(pieces)) // 3)
        parts: list[tuple[float, Callable[[], None]]] = [(0.0, lambda: self._memory.start_copy(copy))]
        for i in range(0, len(pieces), share):
            parts.append((seconds / 3, partial(_move, pieces[i : i + share])))
        error = CopyFailed(f"simulated failure of a {plan.direction.value}") if fails else None
        # A driver may refuse a copy when it is queued, or the device may report it when it was to be done.
        at_once = fails and self._random.random() < 0.5
        parts.append((seconds / 3, lambda: self._end(copy, plan, stream, error, at_once)))
        stream.put_work(parts)
        if error is not None and at_once:
            raise error
        return None

    def _end(self, copy: BlockCopy, plan: Plan, stream: Stream, error: CopyFailed | None, at_once: bool) -> None:
        if error is not None:
            stream.error = None if at_once else error
            # Whatever arrived, nobody may take it for KV.
            for destination, _, size in zip(*(column.tolist() for column in plan.pieces()), strict=True):
                ctypes.memmove(destination, _poison(size), size)
        self._memory.end_copy(copy)


def _blocks(plan: Plan, side: int) -> list[int]:
    return [first + i for first, count in plan.runs[:, [side, RUN_COUNT]].tolist() for i in range(count)]


def _move(pieces: list[tuple[int, int, int]]) -> None:
    for destination, source, size in pieces:
        ctypes.memmove(destination, source, size)


def _poison(size: int) -> bytes:
    return np.full(size // 8, POISON, np.int64).tobytes()


@contextlib.contextmanager
def simulated_device(module: DeviceModule, path: SimulatedPath) -> Iterator[None]:
    """Engines made inside copy by `path` on the streams of `module`."""
    make_backend = npu_copy.engine.make_backend
    npu_copy.engine.make_backend = lambda *_: StreamBackend("simulated", module, torch.device("cpu"), path)
    try:
        yield
    finally:
        npu_copy.engine.make_backend = make_backend


@contextlib.contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """npu-copy's waits for streams take virtual time."""
    time = npu_copy.backends.stream.time
    npu_copy.backends.stream.time = clock  # type: ignore[assignment]
    try:
        yield
    finally:
        npu_copy.backends.stream.time = time
