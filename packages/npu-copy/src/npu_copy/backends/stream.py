"""Copies on an accelerator's streams, ordered by events. CUDA and NPU differ only in the path a copy takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from npu_copy.direction import Direction
from npu_copy.host_pool import HostPool
from npu_copy.plan import Plan, Planner
from npu_copy.regions import Region

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0


class CopyPath(Protocol):
    """One way to queue a plan's copies on a stream."""

    name: str

    def queue(self, plan: Plan, stream: Any) -> object:
        """Queue the copies on ``stream``, which is current; return what must live until they are done."""
        ...


class StreamCopy:
    """A job between two events on its copy stream."""

    def __init__(self, compute_stream: Callable[[], Any]) -> None:
        self._compute_stream = compute_stream
        self._begin: Any = None
        self._end: Any = None
        self._kept: object = None
        self._error: BaseException | None = None

    def start(self, device_module: Any, stream: Any, path: CopyPath, plan: Plan) -> None:
        compute = self._compute_stream()
        try:
            with device_module.stream(stream):
                ready = device_module.Event()
                ready.record(compute)
                stream.wait_event(ready)
                begin = device_module.Event(enable_timing=True)
                end = device_module.Event(enable_timing=True)
                begin.record(stream)
                try:
                    if plan.nbytes:
                        self._kept = path.queue(plan, stream)
                finally:
                    # Also after an error: some copies may be queued, and must be over before the job is.
                    end.record(stream)
                    self._begin, self._end = begin, end
        except Exception as error:
            self._error = error

    def block_compute(self) -> None:
        if self._end is not None:
            self._compute_stream().wait_event(self._end)

    def done(self) -> bool:
        if self._end is None:
            return True
        try:
            return bool(self._end.query())
        except Exception as error:  # the device reports a failed copy to whoever asks next
            self._error = self._error or error
            return True

    def wait(self, timeout: float) -> bool:
        # Event.synchronize() has no time-out.
        deadline = time.monotonic() + timeout
        pause = 20e-6
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return True

    def outcome(self) -> tuple[float, BaseException | None]:
        seconds = 0.0
        if self._error is None:
            try:
                seconds = self._begin.elapsed_time(self._end) / 1e3
            except Exception as error:
                self._error = error
        return seconds, self._error


class StreamBackend:
    """One stream a direction; stores and loads wait for compute, and compute for what blocks it."""

    def __init__(self, name: str, device_module: Any, device: torch.device, path: CopyPath) -> None:
        self.name = name
        self.path = path.name
        self._path = path
        self._module = device_module
        self._device = device
        self._streams = {direction: device_module.Stream(device=device) for direction in Direction}

    def start(self, plan: Plan, *, background: bool) -> StreamCopy:
        copy = StreamCopy(lambda: self._module.current_stream(self._device))
        copy.start(self._module, self._streams[plan.direction], self._path, plan)
        return copy

    def close(self) -> None:
        self._streams.clear()


class TensorCopyPath:
    """One ``Tensor.copy_`` a run: what every torch device offers."""

    name = "Tensor.copy_"

    def __init__(self, regions: Sequence[Region], host_pool: HostPool) -> None:
        self._device = [r.block_view() for r in regions]
        self._host = [host_pool.block_view(i) for i in range(len(regions))]

    def queue(self, plan: Plan, stream: Any) -> object:
        for device, host in zip(self._device, self._host, strict=True):
            source, destination = (device, host) if plan.direction is Direction.STORE else (host, device)
            # A run over padded blocks would be staged through a packed copy.
            step = None if device.is_contiguous() else 1
            for first_source, first_destination, count in plan.runs.tolist():
                for i in range(0, count, step or count):
                    n = step or count
                    s, d = first_source + i, first_destination + i
                    destination[d : d + n].copy_(source[s : s + n], non_blocking=True)
        return None


def first_working(
    name: str,
    device_module: Any,
    paths: Sequence[Callable[[], CopyPath | None]],
    regions: Sequence[Region],
    host_pool: HostPool,
) -> StreamBackend:
    """A backend on the first path that is there and copies the null block to the host rightly.

    Batched copies are young interfaces, which some driver versions export and refuse; better to learn it here than
    with a request's KV at stake.
    """
    for make_path in paths:
        path = make_path()
        if path is None:
            continue
        backend = StreamBackend(name, device_module, regions[0].device, path)
        error = _probe(backend, regions, host_pool)
        if error is None:
            logger.info("npu_copy: %s backend, copies by %s", name, path.name)
            return backend
        logger.warning("npu_copy: %s does not work here (%s)", path.name, error)
    raise RuntimeError(f"no way to copy blocks with the {name!r} backend works here; see the warnings before")


def _probe(backend: StreamBackend, regions: Sequence[Region], host_pool: HostPool) -> BaseException | None:
    copy = backend.start(Planner(regions, host_pool).null_block_plan(), background=True)
    if not copy.wait(_PROBE_TIMEOUT_S):
        return TimeoutError(f"one block not copied in {_PROBE_TIMEOUT_S} s")
    _, error = copy.outcome()
    if error is None:
        for i, region in enumerate(regions):
            if not torch.equal(region.block_view()[0].cpu(), host_pool.block_view(i)[0]):
                return RuntimeError(f"the null block of {region.name} arrived changed")
    return error
