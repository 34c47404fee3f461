"""What the mixin and the connector cost the scheduler: `python -m pd_integration.bench.scheduler`.

vLLM's real scheduler is stepped without an engine. The workers are stood in for by one that copies nothing and reports
every job done, so that what is timed is the scheduler's side alone.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from offload_connector.metadata import OffloadMetadata, OffloadWorkerMetadata
from pd_integration.bench import record
from recompute_scheduler import RecomputeScheduler
from recompute_scheduler.testing import BLOCK_SIZE, ScriptedEngine, make_config, make_kv_cache_config

HOST_BLOCKS = 100_000
TRANSFER = {
    "kv_connector": "RecomputeCPUOffloadConnector",
    "kv_connector_module_path": "offload_connector",
    "kv_role": "kv_consumer",
}


class StandInWorkers:
    """Announces its host blocks once, then reports every job done in the step that brought it."""

    def __init__(self) -> None:
        self._announced = False

    def __call__(self, scheduled: SchedulerOutput) -> KVConnectorOutput:
        report = OffloadWorkerMetadata()
        if not self._announced:
            self._announced = True
            report = OffloadWorkerMetadata(ranks=1, capacity=HOST_BLOCKS, block_bytes=1)
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, OffloadMetadata)
        for job in (metadata.store, metadata.load_now, metadata.load_behind):
            if job is not None:
                report.done[job.job] = 1
        arrived = metadata.load_behind.requests if metadata.load_behind is not None else ()
        return KVConnectorOutput(finished_recving=set(arrived) or None, kv_connector_worker_meta=report)


def engine(ours: bool, requests: int, num_blocks: int, prompt: int) -> ScriptedEngine:
    """Return an engine with `requests` running requests, each past its prompt."""
    config = make_config(
        max_num_seqs=max(requests, 16),
        max_num_batched_tokens=max(4096, requests * 4),
        max_model_len=max(1024, prompt + 512),
        kv_transfer_config=TRANSFER if ours else None,
    )
    cls, worker = (RecomputeScheduler, StandInWorkers()) if ours else (Scheduler, lambda _: None)
    made = ScriptedEngine(cls, config, make_kv_cache_config(num_blocks), worker)
    for index in range(requests):
        made.add(f"r{index}", range(3, 3 + prompt), 100_000)
    while any(
        request.is_prefill_chunk or not request.num_computed_tokens for request in made.scheduler.requests.values()
    ):
        made.step()
    return made


def timed_step(made: ScriptedEngine, victims: int = 0) -> float:
    """Step once, with so many preemptions; return the seconds spent in the scheduler."""
    scheduler = made.scheduler
    # vLLM lets nobody in during a step that preempts.
    scheduler.set_pause_state(PauseState.PAUSED_NEW if victims else PauseState.UNPAUSED)
    start = time.perf_counter()
    preempt(scheduler, [scheduler.running.pop() for _ in range(victims)])
    scheduled = scheduler.schedule()
    spent = time.perf_counter() - start
    output = made.run_model(scheduled)
    start = time.perf_counter()
    scheduler.update_from_output(scheduled, output)
    return spent + time.perf_counter() - start


def preempt(scheduler: Any, victims: Sequence[Request]) -> None:
    """What vLLM does inside schedule() when the KV cache is full to requests that it has taken out of `running`."""
    scheduler._inside_schedule = True
    for request in victims:
        scheduler._preempt_request(request, 0.0)
    scheduler._inside_schedule = False


def steps(requests: int, victims: int, rounds: int) -> dict[str, Any]:
    """A step with `requests` running, `victims` of which are preempted in it: plain and ours in turn."""
    blocks = requests * (64 + 4 * rounds) // BLOCK_SIZE + requests * 2 + 16
    engines = engine(False, requests, blocks, 32), engine(True, requests, blocks, 32)
    pairs = []
    for _ in range(5 + rounds):
        pairs.append([timed_step(made, victims) for made in engines])
        for made in engines:
            while len(made.scheduler.running) < requests:
                timed_step(made)
    plain_us, ours_us = (statistics.median(column) * 1e6 for column in zip(*pairs[5:], strict=True))
    return {
        "running": requests,
        "preempted": victims,
        "plain us": plain_us,
        "ours us": ours_us,
        "difference us": statistics.median(o - p for p, o in pairs[5:]) * 1e6,
        "ratio": ours_us / plain_us,
    }


def victim(blocks: int, rounds: int) -> dict[str, Any]:
    """Time that the preemption of a request of `blocks` blocks takes, and what of it is ours."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for ours, times in spent.items():
            made = engine(ours, 1, blocks + 16, blocks * BLOCK_SIZE - 8)
            start = time.perf_counter()
            preempt(made.scheduler, [made.scheduler.running.pop()])
            times.append(time.perf_counter() - start)
    # The least of the rounds: whatever else the machine did can only have added to the others.
    plain_ms, ours_ms = (min(times) * 1e3 for times in spent.values())
    return {"blocks": blocks, "plain ms": plain_ms, "ours ms": ours_ms, "added ms": ours_ms - plain_ms}


def line(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The straight line through (x, y) points by least squares: slope, intercept, and how much of y it explains."""
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    return {"slope": slope, "intercept": intercept, "r2": statistics.correlation(xs, ys) ** 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps per size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per victim size (default: %(default)s)")
    parser.add_argument("--reports", type=Path, default=record.REPORTS)
    options = parser.parse_args()
    record.log_errors_only()
    step_rows = [
        steps(requests, victims, options.steps)
        for requests in (1, 16, 256, 1024)
        for victims in (0, 1, 8)
        if victims <= requests
    ]
    sizes = [victim(blocks, options.rounds) for blocks in (16, 64, 256, 1024, 2048, 4096, 8192)]
    fit = line([(row["blocks"], row["added ms"]) for row in sizes])
    record.show(record.table("The scheduler's part of a step", step_rows), record.table("A victim", sizes))
    console = Console()
    console.print(
        f"A victim costs {fit['intercept'] * 1e3:.0f} us and {fit['slope'] * 1e3:.3f} us a block more than in plain "
        f"vLLM; this line explains {fit['r2']:.1%} of the differences.",
        soft_wrap=True,
    )
    figures = {"steps": step_rows, "sizes": sizes, "line, ms and blocks": fit}
    console.print(f"wrote {record.write('scheduler', figures, options.reports)}", markup=False)


if __name__ == "__main__":
    main()
