"""One rank: its device, its side of the connectors, and the order in which vLLM's V1 model runner calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from block_mapper import GroupKind, KVGroup
from pd_integration.sim.clock import Clock, DeviceModule, Event
from pd_integration.sim.memory import POISON, RankMemory, rows_and_columns
from pd_integration.sim.model import Row, StepPlan

HOST_SECONDS = 0.002
FORWARD_SECONDS = 0.03


@dataclass(frozen=True)
class Layers:
    """groups: how each KV cache group is used. target, draft: layers of the model and of its drafter in each group."""

    groups: tuple[KVGroup, ...]
    target: range
    draft: range
    lookahead: int

    @property
    def slots(self) -> int:
        return len(self.target) + len(self.draft)


class Rank:
    """Carries out step plans; what it reports is joined with the other ranks' by vLLM's aggregator."""

    def __init__(self, rank: int, clock: Clock, random: Random, memory: RankMemory, layers: Layers) -> None:
        self.rank = rank
        self.memory = memory
        self.connector: Any = None
        self._clock = clock
        self._random = random
        self._layers = layers
        self.module = DeviceModule(clock, lambda: random.expovariate(1 / HOST_SECONDS))
        self._outputs: dict[int, tuple[ModelRunnerOutput, Event]] = {}

    def register(self, refused: bool) -> None:
        """Hand the KV cache tensors to the connector, named by layer as vLLM does; or in a layout nobody knows."""
        tensors: dict[str, Any] = {
            f"group.{g}.layer.{slot}": tensor
            for g in range(len(self._layers.groups))
            for slot, tensor in enumerate(self.memory.tensors)
        }
        if refused:
            tensors["group.0.layer.0"] = tensors["group.0.layer.0"][1:]
        self.connector.register_kv_caches(tensors)

    def execute(self, plan: StepPlan) -> None:
        """The host's part of a step: everything is submitted, little of it is done when this returns."""
        self._clock.advance(self._random.expovariate(1 / HOST_SECONDS))
        scheduled, connector = plan.scheduled, self.connector
        connector.handle_preemptions(scheduled.kv_connector_metadata)
        self._zero(scheduled.new_block_ids_to_zero or [])
        assert not scheduled.kv_cache_block_copies, "the simulated model does not copy blocks"
        connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(None)
        self._submit(plan, self._layers.target, "the forward")
        if not scheduled.has_sync_kv_loads:
            connector.start_load_kv(None)
        drafting = bool(self._layers.lookahead and plan.rows)
        if not drafting:
            connector.wait_for_save()
        output = KVConnectorOutput()
        results = connector.get_transfer_results(scheduled.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if drafting:
            self._submit(plan, self._layers.draft, "the drafter")
            connector.wait_for_save()
        connector.clear_connector_metadata()
        done = self.module.Event()
        done.record(self.module.compute)
        self._outputs[plan.number] = (ModelRunnerOutput([], {}, kv_connector_output=output), done)

    def executed(self, plan: StepPlan) -> bool:
        return plan.number in self._outputs

    def collect(self, plan: StepPlan) -> ModelRunnerOutput:
        """Wait for the device to finish a step, as whoever wants its tokens must."""
        output, done = self._outputs.pop(plan.number)
        if plan.rows:
            self._clock.wait(done.query, f"step {plan.number} on rank {self.rank}")
        return output

    def _zero(self, blocks: list[int]) -> None:
        if not blocks:
            return
        order = self.memory.next_order()

        def zero() -> None:
            self.memory.compute_access(order, frozenset(), frozenset(blocks), "zeroing")
            for tensor in self.memory.tensors:
                tensor.numpy()[blocks] = 0

        self._compute(zero, 0.1)

    def _compute(self, action: Callable[[], None], share: float) -> None:
        seconds = FORWARD_SECONDS * share * self._random.choice((0.3, 0.5, 1.0, 1.0, 3.0))
        self.module.compute.put_work([(seconds, action)])

    def _submit(self, plan: StepPlan, slots: range, what: str) -> None:
        if plan.rows:
            order = self.memory.next_order()
            self._compute(lambda: self._forward(plan, slots, order, what), 0.3 if slots is self._layers.draft else 1.0)

    def _forward(self, plan: StepPlan, slots: range, order: int, what: str) -> None:
        accesses = [_Access(plan.epoch, row, g, group, self.memory.block_size, slots)
                    for row in plan.rows for g, group in enumerate(self._layers.groups)
                    if group.kind is not GroupKind.RECURRENT or slots is self._layers.target]
        reads = frozenset(block for access in accesses for block in access.reads)
        writes = frozenset(block for access in accesses for block in access.writes)
        self.memory.compute_access(order, reads, writes, what)
        poisoned: set[str] = set()
        # A state is read before it is written in place; attention sees what this step writes for other requests.
        recurrent = [a for a in accesses if a.group.kind is GroupKind.RECURRENT]
        attention = [a for a in accesses if a.group.kind is not GroupKind.RECURRENT]
        for access in recurrent:
            self._check(access, what, poisoned)
        for access in accesses:
            self._write(access)
        for access in attention:
            self._check(access, what, poisoned)
        for access in accesses:
            if access.row.text.request_id in poisoned:
                self._write(access, POISON)
        if slots is self._layers.draft:
            self._write_ahead(plan, attention)
        plan.poisoned |= poisoned

    def _check(self, access: _Access, what: str, poisoned: set[str]) -> None:
        if not len(access.reads):
            return
        row = access.row
        what = f"{what} of step for {row.text.request_id} ({row.start}..{row.end}, group {access.index})"
        for slot in access.slots:
            if not self.memory.read(
                access.epoch, access.index, slot, access.reads, access.read_columns, access.expected, what
            ):
                poisoned.add(row.text.request_id)

    def _write(self, access: _Access, value: int | None = None) -> None:
        for slot in access.slots:
            self.memory.write(access.epoch, access.index, [slot], access.writes, access.write_columns,
                              access.digests(slot) if value is None else value)

    def _write_ahead(self, plan: StepPlan, accesses: list[_Access]) -> None:
        """A drafter leaves KV of its own guesses behind the last token of the request."""
        for access in accesses:
            row = access.row
            size = access.group.block_size
            end = min(row.accepted_end + self._layers.lookahead - 1, len(row.tables[access.index]) * size)
            if row.samples and end > row.accepted_end:
                rows, columns = rows_and_columns(row.tables[access.index], row.accepted_end, end, size)
                guesses = row.text.written(row.accepted_end, end, 0, plan.number)
                self.memory.write(access.epoch, access.index, access.slots, rows, columns, guesses)


class _Access:
    """What one row reads and writes in one group, as block ids and offsets."""

    def __init__(self, epoch: int, row: Row, index: int, group: KVGroup, page: int, slots: range) -> None:
        self.epoch, self.row, self.index, self.group, self.slots = epoch, row, index, group, slots
        table, size, start, end = row.tables[index], group.block_size, row.start, row.end
        if group.kind is GroupKind.RECURRENT:
            # The state after n tokens lies in the block of position n - 1 and fills it.
            whole = np.arange(page)
            self.reads = np.repeat(np.array(table[(start - 1) // size : (start - 1) // size + 1]), page)[: page * (start > 0)]
            self.read_columns = whole[: len(self.reads)]
            self.expected = np.repeat(row.text.digests[start - 1 : start], page)[: len(self.reads)]
            self.writes = np.full(page, table[(end - 1) // size])
            self.write_columns = whole
            return
        self.reads, self.read_columns = rows_and_columns(table, first_attended(group, start), start, size)
        self.expected = row.text.digests[first_attended(group, start) : start]
        self.writes, self.write_columns = rows_and_columns(table, start, end, size)

    def digests(self, slot: int) -> Any:
        row = self.row
        if self.group.kind is GroupKind.RECURRENT:
            return np.repeat(row.text.digests[row.end - 1 : row.end], len(self.writes))
        return row.text.written(row.start, row.end, row.accepted_end, slot)


def first_attended(group: KVGroup, position: int) -> int:
    """First position that the token at `position` attends to."""
    if group.kind is GroupKind.SLIDING_WINDOW:
        return max(0, position - (group.window or 0) + 1)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return position // (group.window or 1) * (group.window or 1)
    return 0
