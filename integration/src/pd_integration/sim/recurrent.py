"""Recurrent states as vLLM's V1 runner keeps them (vllm/v1/worker/mamba_utils.py: preprocess_mamba,
postprocess_mamba_fused_kernel).

A step with drafts leaves one state per draft in the slots behind the first; a convolution window keeps all of them in
the first slot, shifted. The next step finds the right one by the number of accepted drafts, which only the workers
know. Where a step ends in another block than the last one, the state moves there first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pd_integration.sim.memory import POISON, RankMemory
from pd_integration.sim.tokens import Text


@dataclass(frozen=True)
class StateMove:
    """One step of one request's state; indices are positions of the block table.

    source: (index, offset) of the state after `start` tokens; None when start is 0. current: the first slot written,
    with the state after `first` tokens; the slots behind it get those after each draft. final: (offset, index) where
    the state at a block's end is moved when the drafts are known, or None.
    """

    start: int
    source: tuple[int, int] | None
    current: int
    first: int
    drafts: int
    accepted: int
    final: tuple[int, int] | None


class StateTracker:
    """Where each request's state lies, by request id: index of the first slot, and offset from it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._at: dict[str, tuple[int, int]] = {}

    def forget(self, request_id: str) -> None:
        """The request ended, or comes back from a preemption with a new table."""
        self._at.pop(request_id, None)

    def move(self, request_id: str, start: int, end: int, drafts: int, accepted: int) -> StateMove:
        """Take the state over positions start..end, the last `drafts` of them drafts, `accepted` of those right."""
        size = self._block_size
        source = self._at.get(request_id, ((start - 1) // size, 0)) if start else None
        current, first = -(-end // size) - 1, end - drafts
        offset, final = accepted, None
        boundary = (first + accepted) // size * size
        if boundary >= first:
            final = (boundary - first, boundary // size - 1)
            if final[1] == current:
                offset = 0
        self._at[request_id] = (current, offset)
        return StateMove(start, source, current, first, drafts, accepted, final)


class StateAccess:
    """A state move on one rank: even layers keep one state a block, odd ones a window in the first slot's block."""

    def __init__(
        self, memory: RankMemory, epoch: int, group: int, table: list[int], text: Text, move: StateMove
    ) -> None:
        self._memory, self._epoch, self._group, self._table = memory, epoch, group, table
        self._text, self._move = text, move
        self.reads = frozenset() if move.source is None else frozenset(table[move.source[0] :][: move.source[1] + 1])
        slots = table[move.current : move.current + move.drafts + 1]
        self.writes = frozenset([*slots, *([] if move.final is None else [table[move.final[1]]])])

    def check(self, layers: range, what: str) -> bool:
        """Read the state that the step starts from; False when it is the remains of a failed load."""
        if self._move.source is None:
            return True
        index, offset = self._move.source
        good = True
        for layer in layers:
            rows, columns = self._place(layer, index, offset)
            expected = np.repeat(self._text.digests[self._move.start - 1 : self._move.start], len(columns))
            good &= self._memory.read(self._epoch, self._group, layer, rows, columns, expected, what)
        return good

    def write(self, layers: range, poisoned: bool = False) -> None:
        move = self._move
        for layer in layers:
            for draft in range(move.drafts + 1):
                rows, columns = self._place(layer, move.current, draft)
                after = move.first + draft
                right = self._text.digests[after - 1 : after] if draft <= move.accepted else np.array([after * 977])
                digests = POISON if poisoned else np.repeat(right, len(columns))
                self._memory.write(self._epoch, self._group, [layer], rows, columns, digests)
            if move.final is not None:
                self._memory.move(
                    layer, self._place(layer, move.current, move.final[0]), self._place(layer, move.final[1], 0)
                )

    def _place(self, layer: int, index: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
        if layer % 2:
            return np.array([self._table[index]]), np.array([offset])
        page = np.arange(self._memory.block_size)
        return np.full(len(page), self._table[index + offset]), page
