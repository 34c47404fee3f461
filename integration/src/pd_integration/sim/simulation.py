"""One run: the engine core's loop around the real scheduler, its clients, and what must hold after every step."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from block_mapper import GroupKind
from npu_copy import Direction
from offload_connector.connector import RecomputeCPUOffloadConnector
from pd_integration.sim import sibling
from pd_integration.sim.clients import Clients
from pd_integration.sim.clock import Clock
from pd_integration.sim.configs import block_hash, kv_cache_config, layers_of, structured_output_manager, vllm_config
from pd_integration.sim.copies import SimulatedPath, simulated_device, virtual_time
from pd_integration.sim.errors import Violation
from pd_integration.sim.features import (
    ManagerWatch,
    note_memory,
    note_scenario,
    note_stats,
    note_step,
    watch_standstills,
)
from pd_integration.sim.memory import RankMemory
from pd_integration.sim.model import Model, StepPlan
from pd_integration.sim.rank import HOST_SECONDS, Rank
from pd_integration.sim.recurrent import StateTracker
from pd_integration.sim.scenario import BLOCK, Scenario
from pd_integration.sim.tokens import POISON_TOKEN
from recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler

PATIENCE_IDLE, PATIENCE = 100, 2000
"""Steps within which some request must get a token as long as there are requests: steps in which no copy is under way,
and steps at all. The slowest copy takes some hundred steps."""


class Simulation:
    """Everything of one scenario, ready to run.

    Args:
        scenario: what happens.
        with_hook: False takes vLLM's own scheduler, which never asks to keep anything.
    """

    def __init__(self, scenario: Scenario, with_hook: bool = True) -> None:
        self.scenario = scenario
        self.features: Counter[str] = Counter()
        self.trace: list[dict[str, int]] = []
        self.clock = Clock()
        self.layers = layers_of(scenario)
        asynchronous = scenario.mode == "async"
        self.model = Model(
            self._random("drafts"),
            scenario.num_drafts,
            fixed_drafts=scenario.lookahead > 0 or asynchronous,
            asynchronous=asynchronous,
            states=next((StateTracker(g.block_size) for g in scenario.groups if g.kind is GroupKind.RECURRENT), None),
        )
        block_bytes = self.layers.total * BLOCK * 8
        config = vllm_config(scenario, block_bytes)
        cache = kv_cache_config(scenario, self.layers)
        sibling.outside = self._outside()
        init_none_hash(block_hash)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        classes = (RecomputeScheduler, AsyncRecomputeScheduler) if with_hook else (Scheduler, AsyncScheduler)
        self.scheduler = classes[asynchronous](
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=structured_output_manager(),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.scheduler.needs_kv_cache_zeroing |= scenario.zeroing
        self.ranks = [self._make_rank(r, config, cache) for r in range(scenario.ranks)]
        self.connector = _ours(self.scheduler.connector)
        self.clients = Clients(
            scenario,
            self.scheduler,
            self.model,
            self.features,
            self.connector.manager,
            get_request_block_hasher(hash_block_size, block_hash),
            self._random("clients"),
        )
        self._aggregator = KVOutputAggregator.from_connector(self.ranks[0].connector, scenario.ranks)
        watch_standstills(self.scheduler, self.features)
        self._watch = ManagerWatch(self.connector.manager, scenario, self.features)
        note_scenario(self.features, scenario, scenario.least_blocks)
        self._in_flight: deque[StepPlan] = deque()
        self._depth = 1 if scenario.mode == "sync" else 2
        self._hosts = self._random("hosts")
        self._without_token = self._without_token_idle = 0

    def _random(self, *names: object) -> Random:
        """Each part draws from its own source: what one does more or less of changes nothing for the others."""
        return Random(repr((self.scenario.seed, *names)))

    def _outside(self) -> sibling.Outside:
        s, random = self.scenario, self._random("outside")
        return sibling.Outside(
            clock=self.clock,
            random=random,
            texts=self.model.texts,
            layers=self.layers,
            seconds=s.remote_seconds,
            epoch=lambda: self.model.epoch,
            fails=lambda: self._happens("remote load failed", s.fail_remote, random),
            by_block=s.model == "full" and s.seed % 2 == 0,
            undecided=lambda: random.random() < 0.2,
            claimed=lambda _: self.features.update(["remote load"]),
        )

    def _happens(self, feature: str, probability: float, random: Random) -> bool:
        if random.random() >= probability:
            return False
        self.features[feature] += 1
        return True

    def _make_rank(self, index: int, config: Any, cache: Any) -> Rank:
        s, random = self.scenario, self._random("rank", index)
        memory = RankMemory(index, s.num_blocks, BLOCK, self.layers.total)
        rank = Rank(index, self.clock, random, memory, self.layers, s.early_output)
        assert sibling.outside is not None
        sibling.outside.memory = memory
        sibling.outside.settle = rank.settle
        faults = self._random("faults", index)
        path = SimulatedPath(
            memory,
            random,
            {Direction.STORE: s.store_seconds, Direction.LOAD: s.load_seconds},
            lambda direction: self._happens(
                f"{direction.value} failed", s.fail_stores if direction is Direction.STORE else s.fail_loads, faults
            ),
        )
        rank.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        with simulated_device(rank.module, path):
            rank.register(refused=s.host_blocks == 0)
        return rank

    # The engine core

    def run(self, steps: int) -> None:
        """Step until all clients are served or gone; raises Violation, or whatever the product raised."""
        with virtual_time(self.clock):
            limit = 200 * steps
            while not self._idle():
                if self.clients.step > limit:
                    raise Violation("no end", f"requests left after {limit} steps: {sorted(self.scheduler.requests)}")
                self._step()
            self._check_end()
            for rank in self.ranks:
                rank.connector.shutdown()

    def _idle(self) -> bool:
        return not (self.clients.coming or self.scheduler.has_requests() or self._in_flight)

    def _step(self) -> None:
        self.clients.act()
        self._check_progress()
        if self.clients.wants_reset:
            while self._in_flight:
                self._take_in()
            self.clients.reset()
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.trace.append(dict(scheduled.num_scheduled_tokens))
            plan = self.model.plan(scheduled, self._in_flight)
            self._in_flight.append(plan)
            for rank in self.ranks:
                # A worker in another process may be early or late.
                if self._hosts.random() < 0.5:
                    self._catch_up(rank, plan)
            self._watch.note_step()
            self._check_step()
            if len(self._in_flight) < self._depth and (plan.rows or self.scheduler.has_requests()):
                return
        elif not self._in_flight:
            self.clock.advance(HOST_SECONDS)
            return
        self._take_in()

    def _catch_up(self, rank: Rank, plan: StepPlan) -> None:
        for earlier in self._in_flight:
            if not rank.executed(earlier):
                rank.execute(earlier)
            if earlier is plan:
                return

    def _take_in(self) -> None:
        plan = self._in_flight[0]
        for rank in self._hosts.sample(self.ranks, len(self.ranks)):
            self._catch_up(rank, plan)
        outputs: list[ModelRunnerOutput | None] = [rank.collect(plan) for rank in self.ranks]
        self._in_flight.popleft()
        output = self._aggregator.aggregate(outputs)
        assert output is not None
        output.req_ids = [row.text.request_id for row in plan.rows]
        output.req_id_to_index = {request_id: i for i, request_id in enumerate(output.req_ids)}
        output.sampled_token_ids = [
            [POISON_TOKEN] * len(row.sampled) if row.text.request_id in plan.poisoned else row.sampled
            for row in plan.rows
        ]
        self.clients.act_during_step()
        for one in self.scheduler.update_from_output(plan.scheduled, output).values():
            if one.scheduler_stats is not None:
                note_stats(self.features, one.scheduler_stats.kv_connector_stats or {})
            for result in one.outputs:
                self._without_token = self._without_token_idle = 0
                self.clients.receive(result)
        if self.scenario.num_drafts and self.scenario.mode == "sync" and plan.rows:
            self.scheduler.update_draft_token_ids(self.model.take_drafts(plan))
        note_step(self.features, self.scenario, plan)
        self._check_step()

    # What must hold

    def _check_step(self) -> None:
        self.connector.manager.check_integrity()
        for rank in self.ranks:
            rank.memory.check_null_block()

    def _check_progress(self) -> None:
        if self.scheduler.get_num_unfinished_requests() == 0:
            self._without_token = self._without_token_idle = 0
            return
        self._without_token += 1
        self._without_token_idle += not any(rank.memory.busy for rank in self.ranks)
        if self._without_token > PATIENCE or self._without_token_idle > PATIENCE_IDLE:
            states = {r.request_id: self.clients.state(r) for r in self.scheduler.requests.values()}
            raise Violation("no progress", f"no token in {self._without_token} steps: {states}")

    def _check_end(self) -> None:
        self.clock.drain()
        self.clients.check_served()
        pool = self.scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() != self.scenario.num_blocks - 1:
            raise Violation(
                "device blocks leaked", f"{pool.get_num_free_blocks()} of {self.scenario.num_blocks - 1} free"
            )
        manager = self.connector.manager
        if manager.has_pending_jobs():
            raise Violation("jobs left", "no request is left, but some job is open")
        if manager._pool is not None and manager._pool.usage().used:
            raise Violation("host blocks leaked", f"{manager._pool.usage()} with no request left")
        for rank in self.ranks:
            note_memory(self.features, rank.memory)
        busy = [rank.rank for rank in self.ranks if rank.memory.busy]
        if busy:
            raise Violation("copies left", f"ranks {busy} still copy")


def _ours(connector: Any) -> RecomputeCPUOffloadConnector:
    children = getattr(connector, "_connectors", [connector])
    return next(child for child in children if isinstance(child, RecomputeCPUOffloadConnector))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """vLLM and the packages log every preemption; a thousand seeds need none of it."""
    import logging

    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
