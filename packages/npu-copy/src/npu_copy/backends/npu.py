"""Ascend NPU: torch_npu's streams and events, and the fastest batched copy this installation has."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from npu_copy import _acl
from npu_copy.backends.stream import CopyPath, StreamBackend, TensorCopyPath, first_working
from npu_copy.direction import Direction
from npu_copy.host_pool import HostPool
from npu_copy.plan import Plan
from npu_copy.regions import Region

# Direction argument of vllm-ascend's op.
_SWAP_DIRECTION = {Direction.LOAD: 0, Direction.STORE: 1}


class SwapBlocksBatchPath:
    """vllm-ascend's ``torch.ops._C_ascend.swap_blocks_batch``: int64 CPU tensors, on the current stream."""

    name = "swap_blocks_batch"

    def queue(self, plan: Plan, stream: Any) -> object:
        destinations, sources, sizes = (torch.from_numpy(column.view(np.int64)) for column in plan.pieces())
        torch.ops._C_ascend.swap_blocks_batch(sources, destinations, sizes, _SWAP_DIRECTION[plan.direction])
        return destinations, sources, sizes


class AclBatchPath:
    """``aclrtMemcpyBatchAsync`` through ctypes."""

    name = "aclrtMemcpyBatchAsync"

    def __init__(self, acl: _acl.Acl) -> None:
        self._acl = acl

    def queue(self, plan: Plan, stream: Any) -> object:
        pieces = plan.pieces()
        # torch_npu queues the events' waits on a host thread of its own; reading npu_stream waits until that queue is
        # empty. A handle read earlier would let the copies overtake the wait for the compute stream.
        self._acl.copy_batch(*pieces, plan.direction, stream.npu_stream)
        return pieces


def npu_backend(regions: Sequence[Region], host_pool: HostPool) -> StreamBackend:
    """The NPU backend on the first working path. RuntimeError when torch_npu is missing."""
    try:
        torch_npu = importlib.import_module("torch_npu")
    except ImportError as error:
        raise RuntimeError(f"the 'npu' backend needs torch_npu, which cannot be imported: {error}") from error
    paths = (_swap_blocks_batch, _acl_batch, lambda: TensorCopyPath(regions, host_pool))
    return first_working("npu", torch_npu.npu, paths, regions, host_pool)


def _swap_blocks_batch() -> CopyPath | None:
    return SwapBlocksBatchPath() if hasattr(torch.ops._C_ascend, "swap_blocks_batch") else None


def _acl_batch() -> CopyPath | None:
    try:
        acl = _acl.load()
    except OSError:
        return None
    return AclBatchPath(acl) if acl.has_batch else None
