"""One rank's device memory: real bytes in blocks, and who may touch which block at this moment.

Bytes alone find a race only when it went wrong this time. So every access is also held against the copies and outside
writes that are under way: what a device may do in another order is a violation whether or not it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pd_integration.sim.errors import Violation
from pd_integration.sim.tokens import Int64Array, flavour

POISON = -0x0BAD0BAD0BAD
"""What a failed load leaves behind."""
_NULL = -0x7EED


@dataclass(eq=False)
class BlockCopy:
    """A store or load of npu-copy from its submission until its last byte.

    order: its place among everything the host submitted to this device. started: its first byte may have moved.
    """

    is_store: bool
    order: int
    device_blocks: frozenset[int]
    host_blocks: frozenset[int]
    started: bool = False


@dataclass(eq=False)
class OutsideWrite:
    """Blocks that another machine writes into, in no order with this device's streams."""

    blocks: frozenset[int] = field(default_factory=frozenset)


class RankMemory:
    """The KV cache of one rank: `slots` tensors of [num_blocks, block_size] int64, shared by all KV cache groups."""

    def __init__(self, rank: int, num_blocks: int, block_size: int, slots: int) -> None:
        self.rank = rank
        self.block_size = block_size
        self.tensors = [torch.full((num_blocks, block_size), 0x77, dtype=torch.int64) for _ in range(slots)]
        self._slots = [tensor.numpy() for tensor in self.tensors]
        for slot in self._slots:
            slot[0] = _NULL
        self._order = 0
        self._copies: list[BlockCopy] = []
        self._outside: list[OutsideWrite] = []
        self._last_store: frozenset[int] = frozenset()
        self.outside_after_store = 0
        """Outside writes into blocks that the last store read: the case that nothing but the host can order."""
        self._flavours: dict[tuple[int, int, int], int] = {}

    def next_order(self) -> int:
        """The place of the operation that the host submits now."""
        self._order += 1
        return self._order

    # Content

    def write(
        self,
        epoch: int,
        group: int,
        slots: Iterable[int],
        rows: Int64Array,
        columns: Int64Array | slice,
        digests: Int64Array | int,
    ) -> None:
        """Write digests (raw when they are POISON or 0) at [row, column] of the given slots."""
        for slot in slots:
            value = digests if isinstance(digests, int) else digests ^ self._flavour(epoch, group, slot)
            self._slots[slot][rows, columns] = value

    def read(
        self,
        epoch: int,
        group: int,
        slot: int,
        rows: Int64Array,
        columns: Int64Array | slice,
        expected: Int64Array,
        what: str,
    ) -> bool:
        """Check what the model reads; False when it is the remains of a failed load."""
        found = self._slots[slot][rows, columns]
        wrong = np.flatnonzero(found != expected ^ self._flavour(epoch, group, slot))
        if not wrong.size:
            return True
        if (found[wrong] == POISON).all():
            return False
        older = next((e for e in range(epoch) if (found == expected ^ self._flavour(e, group, slot)).all()), None)
        if older is not None:
            raise Violation("stale KV", f"rank {self.rank}: {what} reads KV of the model before its last change")
        at = wrong[0]
        block = rows[at] if isinstance(rows, np.ndarray) and rows.ndim and len(rows) > 1 else rows
        raise Violation(
            "wrong KV",
            f"rank {self.rank}: {what} reads wrong bytes at index {at} (block {block}, "
            f"{wrong.size} of {found.size} positions wrong)",
        )

    def move(self, slot: int, source: tuple[Int64Array, Int64Array], target: tuple[Int64Array, Int64Array]) -> None:
        """Copy within the device what lies at (rows, columns), as the model's own kernels do."""
        self._slots[slot][target] = self._slots[slot][source]

    def _flavour(self, epoch: int, group: int, slot: int) -> int:
        key = (epoch, group, slot)
        if key not in self._flavours:
            self._flavours[key] = flavour(epoch, group, slot, self.rank)
        return self._flavours[key]

    def check_null_block(self) -> None:
        for slot in self._slots:
            if (slot[0] != _NULL).any():
                raise Violation("null block written", f"rank {self.rank}")

    # Who touches what

    def begin_copy(self, copy: BlockCopy) -> None:
        """npu-copy submits a copy."""
        for other in self._copies:
            shared = copy.host_blocks & other.host_blocks
            if shared and (copy.is_store or other.is_store):
                raise Violation(
                    "host block race",
                    f"rank {self.rank}: {_name(copy)} of host blocks {sorted(shared)} "
                    f"begins while {_name(other)} of them has not ended",
                )
        for write in self._outside:
            if shared := copy.device_blocks & write.blocks:
                raise Violation(
                    "device block race",
                    f"rank {self.rank}: {_name(copy)} of blocks {sorted(shared)}, which another machine is writing",
                )
        self._copies.append(copy)
        if copy.is_store:
            self._last_store = copy.device_blocks

    def start_copy(self, copy: BlockCopy) -> None:
        """Its first byte moves."""
        copy.started = True
        for other in self._copies:
            shared = copy.device_blocks & other.device_blocks
            both_stores = copy.is_store and other.is_store
            if other is copy or not shared or both_stores or (other.order > copy.order and not other.started):
                continue
            raise Violation(
                "device block race",
                f"rank {self.rank}: {_name(copy)} of blocks {sorted(shared)} runs "
                f"while {_name(other)} of them has not ended",
            )

    def end_copy(self, copy: BlockCopy) -> None:
        self._copies.remove(copy)

    def begin_outside_write(self, blocks: Iterable[int]) -> OutsideWrite:
        """Another connector lets a remote machine write into these blocks from now on."""
        write = OutsideWrite(frozenset(blocks))
        for copy in self._copies:
            if shared := copy.device_blocks & write.blocks:
                raise Violation(
                    "outside write race",
                    f"rank {self.rank}: another machine writes blocks "
                    f"{sorted(shared)} while {_name(copy)} of them has not ended",
                )
        self.outside_after_store += bool(write.blocks & self._last_store)
        self._outside.append(write)
        return write

    def end_outside_write(self, write: OutsideWrite) -> None:
        self._outside.remove(write)

    def compute_access(self, order: int, reads: frozenset[int], writes: frozenset[int], what: str) -> None:
        """The compute stream executes an operation that the host submitted as number `order`."""
        for copy in self._copies:
            touched = writes if copy.is_store else reads | writes
            if copy.started is False and order < copy.order:
                continue  # the copy still waits for what was submitted before it
            if shared := touched & copy.device_blocks:
                raise Violation(
                    "device block race",
                    f"rank {self.rank}: {what} touches blocks {sorted(shared)} while "
                    f"{_name(copy)} of them has not ended",
                )
        for write in self._outside:
            if shared := (reads | writes) & write.blocks:
                raise Violation(
                    "device block race",
                    f"rank {self.rank}: {what} touches blocks {sorted(shared)}, which another machine is writing",
                )

    @property
    def busy(self) -> bool:
        return bool(self._copies or self._outside)


def rows_and_columns(
    table: Sequence[int] | Int64Array, start: int, end: int, block_size: int
) -> tuple[Int64Array, Int64Array]:
    """Where positions start..end of a block table lie: block ids and offsets."""
    positions = np.arange(start, end)
    return np.asarray(table, np.int64)[positions // block_size], positions % block_size


def _name(copy: BlockCopy) -> str:
    return "a store" if copy.is_store else "a load"
