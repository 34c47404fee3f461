"""The host memory that mirrors the device's block regions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from npu_copy import _numa
from npu_copy._host_buffer import HostBuffer, buffer_type
from npu_copy._threads import Team
from npu_copy.host_memory import check_host_memory
from npu_copy.regions import Region


class HostPool:
    """``num_blocks`` host blocks: block ``i`` of region ``r`` lies at ``addresses[r] + i * block_bytes[r]``.

    Block 0 is the null block; it has its place but is never copied. Made by :meth:`allocate`.
    """

    def __init__(self, num_blocks: int, block_bytes: list[int], pinned: bool, team: Team) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.pinned = pinned
        self.team = team
        self._buffers: list[HostBuffer] = []

    @classmethod
    def allocate(
        cls,
        regions: Sequence[Region],
        num_blocks: int,
        *,
        pin: bool | None = None,
        numa_node: int | None = None,
        threads: int | None = None,
        backend: str | None = None,
    ) -> HostPool:
        """Allocate exactly ``num_blocks * sum(block_bytes)`` bytes (each region rounded up to a page) and touch them.

        Args:
            regions: the device's regions, from :func:`find_regions`.
            num_blocks: host blocks, null block 0 included; at least 2.
            pin: pin the memory for the device; default: where the backend is not the CPU.
            numa_node: node to place the memory on; default: the CUDA device's, where the machine has several.
            threads: threads that touch, and later copy on the CPU backend; default: the cores allowed, at most 4.
            backend: "cpu", "cuda" or "npu"; default: by the regions' device.

        Raises:
            InsufficientHostMemory: see :func:`check_host_memory`; also when the driver cannot pin the memory.
            ValueError: fewer than 2 blocks, no regions, ``pin=True`` for the CPU.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        if not regions:
            raise ValueError("regions is empty: pass what find_regions returned")
        device = regions[0].device
        backend = backend or device.type
        pinned = backend != "cpu" if pin is None else pin
        new_buffer = buffer_type(backend, pinned)
        # The Ascend driver is reported to fail or hang at start-up when /dev/shm is smaller than what it pins.
        check_host_memory(num_blocks * sum(r.block_bytes for r in regions), shm=backend == "npu" and pinned)
        if numa_node is None:
            numa_node = _numa.node_of(device)
        pool = cls(num_blocks, [r.block_bytes for r in regions], pinned, Team(threads))
        try:
            for block_bytes in pool.block_bytes:
                pool._buffers.append(new_buffer(num_blocks * block_bytes, pool.team, numa_node))
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def closed(self) -> bool:
        """Whether the memory has been given back."""
        return not self._buffers

    @property
    def addresses(self) -> list[int]:
        """Address of host block 0 of each region."""
        return [buffer.address for buffer in self._buffers]

    @property
    def nbytes(self) -> int:
        """Bytes of all host blocks."""
        return self.num_blocks * sum(self.block_bytes)

    def block_view(self, region: int) -> torch.Tensor:
        """The host blocks of one region as uint8 ``[num_blocks, block_bytes]``; not to be used after :meth:`close`."""
        size = self.num_blocks * self.block_bytes[region]
        memory = (ctypes.c_ubyte * size).from_address(self._buffers[region].address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.num_blocks, self.block_bytes[region])

    def close(self) -> None:
        """Give the memory back. No copy may be running. A second call does nothing."""
        # First: where an interrupt has ended a copy's caller, a helper may still be at it.
        self.team.close()
        while self._buffers:
            self._buffers.pop().close()
