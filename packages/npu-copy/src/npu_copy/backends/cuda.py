"""CUDA: ``cuMemcpyBatchAsync`` where the driver has it (12.8 or newer) and cuda-bindings is installed."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from npu_copy.backends.stream import CopyPath, StreamBackend, TensorCopyPath, first_working
from npu_copy.host_pool import HostPool
from npu_copy.plan import Plan
from npu_copy.regions import Region

# The entry point of this version has failIdx; the one of 13.0 has not.
_DRIVER_VERSION = 12080
_SRC_ACCESS_ORDER_STREAM = 1


class _MemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _MemcpyAttributes(ctypes.Structure):
    _fields_ = [
        ("src_access_order", ctypes.c_uint),
        ("src_location_hint", _MemLocation),
        ("dst_location_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    ]


_BATCH_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)


class CudaBatchPath:
    """One driver call for all pieces; sources are read in stream order."""

    name = "cuMemcpyBatchAsync"

    def __init__(self, address: int) -> None:
        """``address`` is the driver's entry point."""
        self._function = _BATCH_FUNCTION(address)

    def queue(self, plan: Plan, stream: Any) -> object:
        pieces = destinations, sources, sizes = plan.pieces()
        attributes = _MemcpyAttributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        attribute_index = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(-1)
        error = self._function(
            destinations.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(attribute_index),
            1,
            ctypes.addressof(failed),
            stream.cuda_stream,
        )
        if error:
            where = f" at copy {failed.value} of {len(sizes)}" if failed.value < len(sizes) else ""
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {error}{where}")
        return pieces


def cuda_backend(regions: Sequence[Region], host_pool: HostPool) -> StreamBackend:
    """The CUDA backend on the first working path. RuntimeError when torch has no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("the 'cuda' backend needs a torch build with CUDA and a device: torch.cuda.is_available()")
    return first_working(
        "cuda", torch.cuda, (_cuda_batch, lambda: TensorCopyPath(regions, host_pool)), regions, host_pool
    )


def _cuda_batch() -> CopyPath | None:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        status, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _DRIVER_VERSION, 0)
    except (ImportError, RuntimeError):
        return None
    return CudaBatchPath(int(address)) if int(status) == 0 and address else None
