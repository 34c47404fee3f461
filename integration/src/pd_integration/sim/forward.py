"""What a forward does to a rank's memory: reads all the KV that its tokens attend to, and writes theirs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from block_mapper import GroupKind, KVGroup
from pd_integration.sim.memory import POISON, RankMemory, rows_and_columns
from pd_integration.sim.model import Row, StepPlan
from pd_integration.sim.recurrent import StateAccess


@dataclass(frozen=True)
class Layers:
    """groups: how each KV cache group is used. target, draft: layers of the model and of its drafter in each group.
    lookahead: positions behind the last token that the drafter writes too."""

    groups: tuple[KVGroup, ...]
    target: range
    draft: range
    lookahead: int

    @property
    def total(self) -> int:
        return len(self.target) + len(self.draft)


class Forward:
    """One forward on one rank, of the model or of its drafter.

    Args:
        order: its place among everything the host submitted to this device.
    """

    def __init__(self, memory: RankMemory, layers: Layers, plan: StepPlan, drafter: bool, order: int) -> None:
        self._memory, self._layers, self._plan, self._order = memory, layers, plan, order
        self._drafter = drafter
        self._slots = layers.draft if drafter else layers.target
        self._what = "the drafter" if drafter else "the forward"

    def run(self) -> None:
        """Executed by the compute stream: all at once, at the end of its time."""
        attention: list[_Attention] = []
        states: list[tuple[Row, StateAccess]] = []
        for row in self._plan.rows:
            for g, group in enumerate(self._layers.groups):
                if group.kind is not GroupKind.RECURRENT:
                    attention.append(_Attention(row, g, group))
                elif not self._drafter:
                    assert row.state is not None
                    state = StateAccess(self._memory, self._plan.epoch, g, row.tables[g], row.text, row.state)
                    states.append((row, state))
        reads = [a.reads for a in attention] + [state.reads for _, state in states]
        writes = [a.writes for a in attention] + [state.writes for _, state in states]
        self._memory.compute_access(self._order, frozenset().union(*reads), frozenset().union(*writes), self._what)
        poisoned: set[str] = set()
        # A state is read before it is written in place; attention sees what this step writes for other requests.
        for row, state in states:
            if not state.check(self._slots, self._describe(row)):
                poisoned.add(row.text.request_id)
            state.write(self._slots)
        for access in attention:
            self._write(access)
        for access in attention:
            self._check(access, poisoned)
        self._spoil(attention, states, poisoned)
        if self._drafter:
            for access in attention:
                self._write_ahead(access)
        self._plan.poisoned |= poisoned

    def _describe(self, row: Row) -> str:
        return f"{self._what} of step {self._plan.number} for {row.text.request_id} ({row.start}..{row.end})"

    def _check(self, access: _Attention, poisoned: set[str]) -> None:
        row = access.row
        rows, columns = rows_and_columns(row.tables[access.index], access.start, row.start, access.group.block_size)
        if not len(rows):
            return
        expected = row.text.digests[access.start : row.start]
        for slot in self._slots:
            if not self._memory.read(
                self._plan.epoch, access.index, slot, rows, columns, expected, self._describe(row)
            ):
                poisoned.add(row.text.request_id)

    def _write(self, access: _Attention) -> None:
        row = access.row
        rows, columns = rows_and_columns(row.tables[access.index], row.start, row.end, access.group.block_size)
        for slot in self._slots:
            digests = row.text.written(row.start, row.end, row.accepted_end, slot)
            self._memory.write(self._plan.epoch, access.index, [slot], rows, columns, digests)

    def _spoil(self, attention: list[_Attention], states: list[tuple[Row, StateAccess]], poisoned: set[str]) -> None:
        """What is computed from the remains of a failed load is as bad."""
        for row, state in states:
            if row.text.request_id in poisoned:
                state.write(self._slots, poisoned=True)
        for access in attention:
            row = access.row
            if row.text.request_id in poisoned:
                rows, columns = rows_and_columns(row.tables[access.index], row.start, row.end, access.group.block_size)
                self._memory.write(self._plan.epoch, access.index, self._slots, rows, columns, POISON)

    def _write_ahead(self, access: _Attention) -> None:
        """A drafter leaves KV of its own guesses behind the last token of the request."""
        row, size = access.row, access.group.block_size
        table = row.tables[access.index]
        end = min(row.accepted_end + self._layers.lookahead - 1, len(table) * size)
        if row.samples and end > row.accepted_end:
            rows, columns = rows_and_columns(table, row.accepted_end, end, size)
            guesses = np.arange(row.accepted_end, end, dtype=np.int64) * 7919
            self._memory.write(self._plan.epoch, access.index, self._slots, rows, columns, guesses)


class _Attention:
    """One row in one attention group: it attends to positions start and up; reads and writes are block ids."""

    def __init__(self, row: Row, index: int, group: KVGroup) -> None:
        self.row, self.index, self.group = row, index, group
        self.start = first_attended(group, row.start)
        table, size = row.tables[index], group.block_size
        self.reads = frozenset(table[self.start // size : -(-row.start // size)])
        self.writes = frozenset(table[row.start // size : -(-row.end // size)])


def first_attended(group: KVGroup, position: int) -> int:
    """First position that the token at `position` attends to."""
    if group.kind is GroupKind.SLIDING_WINDOW:
        return max(0, position - (group.window or 0) + 1)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return position // (group.window or 1) * (group.window or 1)
    return 0
