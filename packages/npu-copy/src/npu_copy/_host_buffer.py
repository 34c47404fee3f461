"""Host memory of exactly the size asked for, pageable or pinned.

torch's pinned allocators round each allocation up to a power of two: 50 GiB asked for can take 96. So CUDA gets pages
that were registered, and the NPU gets ``aclrtMallocHost`` directly.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import Any, Protocol

import torch

from npu_copy import _acl, _numa
from npu_copy._threads import Team
from npu_copy.host_memory import InsufficientHostMemory, memlock_free, shm_free

logger = logging.getLogger(__name__)

_TOUCH_SLICE = 64 << 20


class HostBuffer(Protocol):
    """``size`` bytes at ``address`` until closed."""

    address: int

    def __init__(self, size: int, team: Team, numa_node: int | None) -> None: ...

    def close(self) -> None: ...


class PageBuffer:
    """Anonymous pages, huge where the kernel offers them, touched by the team's threads."""

    def __init__(self, size: int, team: Team, numa_node: int | None) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel built without transparent huge pages
            logger.debug("npu_copy: no transparent huge pages: %s", error)
        if numa_node is not None:
            _numa.prefer(self.address, size, numa_node)
        _touch(self.address, size, team)

    def close(self) -> None:
        self._map.close()


class RegisteredBuffer:
    """Pages pinned by ``cudaHostRegister``."""

    def __init__(self, size: int, team: Team, numa_node: int | None) -> None:
        self._pages = PageBuffer(size, team, numa_node)
        self.address = self._pages.address
        error = int(_cudart().cudaHostRegister(self.address, size, 0))
        if error:
            self._pages.close()
            raise _cannot_pin("cudaHostRegister", size, error)

    def close(self) -> None:
        error = int(_cudart().cudaHostUnregister(self.address))
        if error:  # still mapped for the device: leaking the pages is the safe way out
            raise RuntimeError(f"cudaHostUnregister({self.address:#x}) failed with CUDA error {error}")
        self._pages.close()


class AclBuffer:
    """Pinned memory from ``aclrtMallocHost``."""

    def __init__(self, size: int, team: Team, numa_node: int | None) -> None:
        if numa_node is not None:
            logger.warning("npu_copy: aclrtMallocHost places the memory itself; numa_node=%d is not used", numa_node)
        self._acl = _acl.load()
        try:
            self.address = self._acl.malloc_host(size)
        except _acl.AclError as error:
            raise _cannot_pin("aclrtMallocHost", size, error.code) from error
        _touch(self.address, size, team)

    def close(self) -> None:
        self._acl.free_host(self.address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_PINNED: dict[str, type[HostBuffer]] = {"cuda": RegisteredBuffer, "npu": AclBuffer}


def buffer_type(backend: str, pin: bool) -> type[HostBuffer]:
    """The kind of host memory a backend copies with. ValueError where it has no pinned memory."""
    if not pin:
        return PageBuffer
    if backend not in _PINNED:
        raise ValueError(f"pin=True: the {backend!r} backend has no pinned memory; leave pin out")
    return _PINNED[backend]


def _touch(address: int, size: int, team: Team) -> None:
    """Fault the pages in now, from the threads that will copy, and not in the middle of serving."""

    def zero(i: int) -> None:
        start = i * _TOUCH_SLICE
        ctypes.memset(address + start, 0, min(_TOUCH_SLICE, size - start))

    team.run(-(-size // _TOUCH_SLICE), zero)


def _cannot_pin(function: str, size: int, code: int) -> InsufficientHostMemory:
    limits = [f"{name}={value}" for name, value in (("memlock", memlock_free()), ("/dev/shm", shm_free())) if value]
    return InsufficientHostMemory(
        f"{function} could not pin {size} bytes (error {code}; free bytes: {', '.join(limits) or 'no limit read'}): "
        "lower the budget, or start the container with --ulimit memlock=-1 and a larger --shm-size"
    )
