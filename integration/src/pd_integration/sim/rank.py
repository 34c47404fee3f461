"""One rank: its device, its side of the connectors, and the order in which vLLM's V1 model runner calls them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from pd_integration._vllm import block_copies
from pd_integration.sim.clock import Clock, DeviceModule, Event
from pd_integration.sim.forward import Forward, Layers
from pd_integration.sim.memory import RankMemory
from pd_integration.sim.model import StepPlan
from recompute_scheduler.testing import loads_before_forward, worker_output

HOST_SECONDS = 0.002
FORWARD_SECONDS = 0.03


class Rank:
    """Carries out step plans; what it reports is joined with the other ranks' by vLLM's aggregator.

    Args:
        early_output: a step's tokens are out while its drafter still runs, as in vLLM's V2 model runner.
    """

    def __init__(
        self, rank: int, clock: Clock, random: Random, memory: RankMemory, layers: Layers, early_output: bool
    ) -> None:
        self._early_output = early_output
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
        assert not block_copies(scheduled), "the simulated model does not copy blocks"
        connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        if loads_before_forward(scheduled):
            connector.start_load_kv(None)
        self._submit(plan, drafter=False)
        if not loads_before_forward(scheduled):
            connector.start_load_kv(None)
        drafting = bool(self._layers.lookahead and plan.rows)
        if not drafting:
            connector.wait_for_save()
        output = worker_output(connector, scheduled.finished_req_ids)
        done = self.module.Event()
        if self._early_output:
            done.record(self.module.compute)
        if drafting:
            self._submit(plan, drafter=True)
            connector.wait_for_save()
        connector.clear_connector_metadata()
        if not self._early_output:
            done.record(self.module.compute)
        self._outputs[plan.number] = (ModelRunnerOutput([], {}, kv_connector_output=output), done)

    def settle(self) -> None:
        """Wait until the device has done all that was submitted."""
        done = self.module.Event()
        done.record(self.module.compute)
        self._clock.wait(done.query, f"what rank {self.rank} computes")

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

    def _submit(self, plan: StepPlan, drafter: bool) -> None:
        if plan.rows:
            forward = Forward(self.memory, self._layers, plan, drafter, self.memory.next_order())
            self._compute(forward.run, 0.3 if drafter else 1.0)
