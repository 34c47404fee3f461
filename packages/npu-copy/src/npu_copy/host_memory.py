"""What the host can still give, asked before a large allocation and not by trying it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_GIB = 1 << 30
_CAP_IPC_LOCK = 14


class InsufficientHostMemory(MemoryError):
    """The host cannot hold the pool; the message names what is short, by how much, and what to set."""


def check_host_memory(nbytes: int, *, pinned: bool = False, shm: bool = False, root: Path = Path("/")) -> None:
    """Raise unless ``nbytes`` more host memory can be had.

    Args:
        nbytes: bytes about to be allocated.
        pinned: the memory will be locked by this process (``mlock``), so RLIMIT_MEMLOCK counts. Memory that a CUDA or
            NPU driver pins is not accounted there.
        shm: the memory will come from /dev/shm, or the driver needs as much there.
        root: where /proc, /sys and /dev are looked up.

    Raises:
        InsufficientHostMemory: free RAM, a cgroup limit, /dev/shm or the memlock limit is too small. All that are
            short are named.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
    short = [
        f"{what}: {free / _GIB:.2f} GiB free, {(nbytes - free) / _GIB:.2f} GiB short; {fix}"
        for what, free, fix in _limits(root, pinned=pinned, shm=shm)
        if free < nbytes
    ]
    if short:
        raise InsufficientHostMemory(f"cannot allocate {nbytes} bytes ({nbytes / _GIB:.2f} GiB): " + "; ".join(short))


def host_limits(root: Path = Path("/")) -> list[tuple[str, int]]:
    """Every limit that could be read, with the bytes still free under it."""
    return [(what, free) for what, free, _ in _limits(root, pinned=True, shm=True)]


def _limits(root: Path, *, pinned: bool, shm: bool) -> Iterator[tuple[str, int, str]]:
    available = _mem_available(root)
    if available is not None:
        yield "host RAM (MemAvailable)", available, "lower the budget (per rank, times the ranks on this host)"
    for path, free in _cgroup_free(root):
        yield f"cgroup memory limit ({path})", free, "raise the container's --memory or lower the budget"
    if shm:
        shared = shm_free(root)
        if shared is not None:
            yield (
                "/dev/shm",
                shared,
                "start the container with a larger --shm-size (A3, 16 GiB a card: --shm-size=1024g)",
            )
    if pinned:
        lockable = memlock_free(root)
        if lockable is not None:
            yield "RLIMIT_MEMLOCK (ulimit -l)", lockable, "start the container with --ulimit memlock=-1"


def _mem_available(root: Path) -> int | None:
    fields = _fields(root / "proc/meminfo")
    return _kib(fields["MemAvailable"]) if "MemAvailable" in fields else None


def shm_free(root: Path = Path("/")) -> int | None:
    """Free bytes in /dev/shm, or None where there is none."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def memlock_free(root: Path = Path("/")) -> int | None:
    """Bytes this process may still lock, or None where nothing limits it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = _fields(root / "proc/self/status")
    privileged = int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1
    if soft == resource.RLIM_INFINITY or privileged:
        return None
    return max(0, soft - _kib(status.get("VmLck", "0 kB")))


def _cgroup_free(root: Path) -> Iterator[tuple[str, int]]:
    """Free bytes under each memory limit between this process's cgroup and the root, version 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be that of the host; its own limit is then at the mount itself.
        relative = Path(path.strip("/"))
        for directory in (mount / relative, *(mount / parent for parent in relative.parents)):
            free = _limit_free(directory, *names)
            if free is not None:
                yield str(directory), free


def _limit_free(directory: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        maximum = (directory / limit).read_text().strip()
        used = int((directory / usage).read_text())
    except (OSError, ValueError):
        return None
    if maximum == "max" or int(maximum) >= 1 << 62:  # version 1 writes "no limit" as the largest page multiple
        return None
    return max(0, int(maximum) - used + int(_fields(directory / "memory.stat", " ").get(reclaimable, "0")))


def _fields(path: Path, separator: str = ":") -> dict[str, str]:
    """The ``name<separator>value`` lines of a kernel file; none where it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(separator, 1) for line in lines if separator in line)
    return {name: value.strip() for name, value in pairs}


def _kib(value: str) -> int:
    """Bytes of a value such as ``123 kB``."""
    return int(value.split()[0]) * 1024
