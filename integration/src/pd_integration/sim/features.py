"""What a run was an example of. A state or fault that never occurs is not tested, so each has to, in every full run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from prometheus_client import Counter as PrometheusCounter
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from block_mapper import PoolUsage
from offload_connector import RecomputeCPUOffloadConnector
from offload_connector.manager import OffloadManager
from offload_connector.metadata import OffloadMetadata, OffloadWorkerMetadata
from offload_connector.metrics import METRICS
from pd_integration.sim.memory import RankMemory
from pd_integration.sim.model import StepPlan
from pd_integration.sim.scenario import ABORT_STATES, BLOCK, MODELS, MODES, RANKS, SIBLINGS, Scenario
from recompute_scheduler import RecomputePreemption
from recompute_scheduler.testing import VICTIMS_MAY_BE_IN_FLIGHT

_REQUIRED = (
    *(f"mode {mode}" for mode in MODES),
    *(f"ranks {ranks}" for ranks in RANKS),
    *(f"model {model}" for model in MODELS),
    *(f"sibling {sibling}" for sibling in SIBLINGS),
    *(f"abort while {state}" for state in ABORT_STATES),
    "policy priority",
    "policy fcfs",
    "device cache of hardly one request",
    "host budget of nothing",
    "host budget of one block",
    "host budget ample",
    "ended by length",
    "ended by a stop token",
    "ended by a failed load",
    "reset",
    "reset with running requests",
    "reset with loaded requests",
    "decode step",
    "draft accepted",
    "draft rejected",
    "drafts and recurrent states",
    "output before the drafter's end",
    "null block in a table",
    "blocks zeroed",
    "prefix hit",
    "preempted_offloaded",
    "preempted_restored",
    "standstill resolved",
    "fallback host_full",
    "fallback copy_failed",
    "fallback unsupported",
    "fallback served_elsewhere",
    "saved with a partial block",
    "saved whole blocks",
    "saved again",
    "several victims in a step",
    "asked while storing",
    "restored beside a prefix hit",
    "load within a step",
    "load behind the step",
    "host blocks shared",
    "store failed",
    "load failed",
    "load within a step failed, recompute",
    "load within a step failed, fail",
    "load within overlapping steps failed, fail",
    "poisoned forward",
    "remote load",
    "remote load failed",
    "remote load into blocks just stored",
    "schedule compared with vLLM's own",
)
# Where a victim's step may be in flight, no load runs within overlapping steps.
_IMPOSSIBLE = {"load within overlapping steps failed, fail"} if VICTIMS_MAY_BE_IN_FLIGHT else set()
REQUIRED = tuple(feature for feature in _REQUIRED if feature not in _IMPOSSIBLE)


def note_scenario(features: Counter[str], scenario: Scenario, least_blocks: int) -> None:
    features[f"mode {scenario.mode}"] += 1
    features[f"ranks {scenario.ranks}"] += 1
    features[f"model {scenario.model}"] += 1
    features[f"sibling {scenario.sibling}"] += 1
    features["policy priority" if scenario.priority else "policy fcfs"] += 1
    features["device cache of hardly one request"] += scenario.num_blocks <= least_blocks + 2
    features["output before the drafter's end"] += scenario.early_output and scenario.lookahead > 0
    features["host budget of nothing"] += scenario.host_blocks == 0
    features["host budget of one block"] += scenario.host_blocks == 1
    features["host budget ample"] += scenario.host_blocks >= 4 * scenario.num_blocks


def note_step(features: Counter[str], scenario: Scenario, plan: StepPlan) -> None:
    """What the workers saw in a step."""
    for row in plan.rows:
        features["draft accepted"] += row.accepted > 0
        features["draft rejected"] += row.accepted < row.drafts
        features["drafts and recurrent states"] += bool(row.drafts) and "recurrent" in scenario.model
        features["null block in a table"] += any(0 in table for table in row.tables)
        features["decode step"] += row.samples and row.start > 0 and row.end - row.start == 1 + row.drafts
    features["prefix hit"] += any(new.num_computed_tokens >= BLOCK for new in plan.scheduled.scheduled_new_reqs)
    features["blocks zeroed"] += bool(plan.scheduled.new_block_ids_to_zero)
    features["poisoned forward"] += bool(plan.poisoned)


def note_stats(features: Counter[str], stats: dict[str, Any]) -> None:
    """What the connector counts; in MultiConnector its figures stand under its name."""
    ours = stats.get(RecomputeCPUOffloadConnector.__name__, stats)
    for name, values in getattr(ours, "data", ours).items():
        if name in METRICS and METRICS[name].kind is PrometheusCounter:
            for label, amount in values.items():
                features[f"{name} {label}".strip()] += int(amount)


def note_memory(features: Counter[str], memory: RankMemory) -> None:
    features["remote load into blocks just stored"] += memory.outside_after_store


def watch_standstills(scheduler: Scheduler, features: Counter[str]) -> None:
    """Count how often the mixin lets a queue move again in which requests hold each other up."""
    if not isinstance(scheduler, RecomputePreemption):
        return
    resolve = scheduler._resolve_standstill

    def watched() -> None:
        features["standstill resolved"] += 1
        resolve()

    scheduler._resolve_standstill = watched  # type: ignore[method-assign,assignment]


class ManagerWatch:
    """Listens to what the scheduler asks and tells the connector's scheduler side; changes nothing."""

    def __init__(self, manager: OffloadManager, scenario: Scenario, features: Counter[str]) -> None:
        self._features = features
        self._within: set[int] = set()
        self._restored: set[str] = set()
        self._victims = 0
        keep, query, allocated = manager.keep, manager.restorable_tokens, manager.allocated
        build, update = manager.build_metadata, manager.update

        def watched_keep(request: Request, block_ids: Sequence[Sequence[int]], num_computed_tokens: int) -> bool:
            before = manager._pool.usage() if manager._pool is not None else None
            kept = keep(request, block_ids, num_computed_tokens)
            if kept:
                assert before is not None
                self._saved(request, num_computed_tokens, before)
            return kept

        def watched_query(request: Request, num_device_tokens: int) -> tuple[int | None, bool]:
            answer = query(request, num_device_tokens)
            features["asked while storing"] += answer[0] is None
            return answer

        def watched_allocated(request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
            loads = query(request, 0)
            if num_external_tokens and loads[0]:
                features["load behind the step" if loads[1] else "load within a step"] += 1
                features["restored beside a prefix hit"] += num_external_tokens < loads[0]
                self._restored.add(request.request_id)
            allocated(request, block_ids, num_external_tokens)

        def watched_build(scheduled: SchedulerOutput) -> OffloadMetadata:
            metadata = build(scheduled)
            if metadata.load_now is not None:
                self._within.add(metadata.load_now.job)
            return metadata

        def watched_update(message: OffloadWorkerMetadata | None) -> None:
            if message is not None and self._within & message.failed.keys():
                steps = "a step" if scenario.mode == "sync" else "overlapping steps"
                features[f"load within {steps} failed, {scenario.failure_policy}"] += 1
            update(message)

        manager.keep = watched_keep  # type: ignore[method-assign,assignment]
        manager.restorable_tokens = watched_query  # type: ignore[method-assign,assignment]
        manager.allocated = watched_allocated  # type: ignore[method-assign,assignment]
        manager.build_metadata = watched_build  # type: ignore[method-assign,assignment]
        manager.update = watched_update  # type: ignore[method-assign,assignment]
        self._manager = manager

    def _saved(self, request: Request, num_computed_tokens: int, before: PoolUsage) -> None:
        self._victims += 1
        num_tokens = min(num_computed_tokens, request.num_tokens)
        self._features["saved with a partial block" if num_tokens % BLOCK else "saved whole blocks"] += 1
        pool, saved = self._manager._pool, self._manager._saved
        assert pool is not None
        assert saved is not None
        held = sum(int(np.count_nonzero(table)) for table in saved.host_tables(request.request_id))
        self._features["host blocks shared"] += pool.usage().used - before.used < held
        self._features["saved again"] += request.request_id in self._restored

    def note_step(self) -> None:
        """A step has been scheduled."""
        self._features["several victims in a step"] += self._victims > 1
        self._victims = 0
