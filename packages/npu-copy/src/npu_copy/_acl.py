"""The part of CANN's runtime library that torch_npu does not offer, through ctypes.

Signatures and structs: CANN 8.5 ``acl_rt.h``; the batched copy is marked experimental there.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from npu_copy.direction import Direction

UInt64Array = npt.NDArray[np.uint64]

LIBRARY = "libascendcl.so"
_HOST, _DEVICE = 0, 1
_NO_SINGLE_COPY = ctypes.c_size_t(-1).value


class _MemLocation(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]


class _MemcpyBatchAttr(ctypes.Structure):
    _fields_ = [("destination", _MemLocation), ("source", _MemLocation), ("reserved", ctypes.c_uint8 * 16)]


class AclError(RuntimeError):
    """A CANN runtime call failed."""

    def __init__(self, function: str, code: int, detail: str = "") -> None:
        super().__init__(f"{function} failed with ACL error {code}{detail}")
        self.code = code


class Acl:
    """``libascendcl`` of this process."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Load the library. OSError when it is not there."""
        self._library = ctypes.CDLL(library)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._declare("aclrtMallocHost", ctypes.POINTER(pointer), size)
        self._declare("aclrtFreeHost", pointer)
        self._declare("aclrtGetDevice", ctypes.POINTER(ctypes.c_int32))
        self.has_batch = hasattr(self._library, "aclrtMemcpyBatchAsync")
        if self.has_batch:
            self._declare("aclrtMemcpyBatchAsync", *[pointer] * 4, size, *[pointer] * 2, size, pointer, pointer)

    def malloc_host(self, size: int) -> int:
        """Address of ``size`` bytes of pinned host memory. AclError when there is none."""
        address = ctypes.c_void_p()
        self._call("aclrtMallocHost", ctypes.byref(address), size)
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        self._call("aclrtFreeHost", address)

    def current_device(self) -> int:
        device = ctypes.c_int32()
        self._call("aclrtGetDevice", ctypes.byref(device))
        return device.value

    def copy_batch(
        self,
        destinations: UInt64Array,
        sources: UInt64Array,
        sizes: UInt64Array,
        direction: Direction,
        stream: int,
    ) -> None:
        """Queue copies on ``stream``. The host side must be pinned: otherwise the call returns only when they are done.

        Raises:
            AclError: with the failing copy where there is one.
        """
        device = _MemLocation(self.current_device(), _DEVICE)
        host = _MemLocation(0, _HOST)
        ends = (host, device) if direction is Direction.STORE else (device, host)
        attribute = _MemcpyBatchAttr(*ends)
        attribute_index = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(_NO_SINGLE_COPY)
        try:
            self._call(
                "aclrtMemcpyBatchAsync",
                destinations.ctypes.data,
                sizes.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                ctypes.addressof(attribute),
                ctypes.addressof(attribute_index),
                1,
                ctypes.addressof(failed),
                stream,
            )
        except AclError as error:
            if failed.value == _NO_SINGLE_COPY or failed.value >= len(sizes):
                raise
            i = failed.value
            detail = f" at copy {i}: {sizes[i]} bytes from {sources[i]:#x} to {destinations[i]:#x}"
            raise AclError("aclrtMemcpyBatchAsync", error.code, detail) from None

    def _declare(self, function: str, *arguments: type) -> None:
        getattr(self._library, function).argtypes = arguments
        getattr(self._library, function).restype = ctypes.c_int

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise AclError(function, code)


@functools.cache
def load() -> Acl:
    """The process's library, loaded once. OSError when it is not there."""
    return Acl()
