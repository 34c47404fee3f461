"""What the engine asks of a backend, and the backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from npu_copy.host_pool import HostPool
from npu_copy.plan import Plan
from npu_copy.regions import Region

NAMES = ("cpu", "cuda", "npu")


class Copy(Protocol):
    """A job's copies under way."""

    def block_compute(self) -> None:
        """Make the compute stream, as of this call, wait for the copies; on the CPU, wait for them here."""
        ...

    def done(self) -> bool:
        """Whether nothing of this job touches memory any more, because it finished or failed."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait until :meth:`done`, at most ``timeout`` seconds; return :meth:`done`."""
        ...

    def outcome(self) -> tuple[float, BaseException | None]:
        """Seconds the copies took and the error that stopped them. Only when :meth:`done`."""
        ...


class Backend(Protocol):
    """Copies of one direction start in the order of the calls."""

    name: str
    path: str

    def start(self, plan: Plan, *, background: bool) -> Copy:
        """Start a job's copies; they wait for the compute stream's work so far.

        ``background`` is false when :meth:`Copy.block_compute` follows: the caller would only wait.

        Errors that stop the copies belong to the outcome and are not raised.
        """
        ...

    def close(self) -> None:
        """Free threads and streams; all copies are done."""
        ...


def make_backend(name: str, regions: Sequence[Region], host_pool: HostPool) -> Backend:
    """Make a backend; only the one asked for is imported. ValueError for an unknown name."""
    if name == "cpu":
        from npu_copy.backends.cpu import CpuBackend

        return CpuBackend(host_pool.team)
    if name == "cuda":
        from npu_copy.backends.cuda import cuda_backend

        return cuda_backend(regions, host_pool)
    if name == "npu":
        from npu_copy.backends.npu import npu_backend

        return npu_backend(regions, host_pool)
    raise ValueError(f"unknown backend {name!r}: must be one of {', '.join(NAMES)}")
