"""What the mixin and the connector cost the scheduler: `python -m pd_integration.bench.scheduler`.

vLLM's real scheduler is stepped without an engine. The workers are stood in for by one that copies nothing and reports
every job done, so that what is timed is the scheduler's side alone.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from rich.console import Console
from rich.table import Table
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from offload_connector.metadata import OffloadMetadata, OffloadWorkerMetadata
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
        return KVConnectorOutput(kv_connector_worker_meta=report)


def engine(ours: bool, requests: int, num_blocks: int, prompt: int) -> ScriptedEngine:
    """Return an engine with `requests` running requests, each past its prompt."""
    config = make_config(
        max_num_seqs=max(requests, 16),
        max_num_batched_tokens=max(4096, requests * 4),
        max_model_len=max(1024, prompt + 512),
        **({"kv_transfer_config": TRANSFER} if ours else {}),
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


def timed_step(made: ScriptedEngine) -> float:
    """Step once; return the seconds spent in the scheduler."""
    scheduler = made.scheduler
    start = time.perf_counter()
    scheduled = scheduler.schedule()
    spent = time.perf_counter() - start
    output = made.run_model(scheduled)
    start = time.perf_counter()
    scheduler.update_from_output(scheduled, output)
    return spent + time.perf_counter() - start


def quiet_steps(requests: int, steps: int) -> dict[str, Any]:
    """Steps in which nobody is preempted: plain and ours in turn."""
    blocks = requests * (64 + steps) // BLOCK_SIZE + requests * 2 + 16
    plain, ours = engine(False, requests, blocks, 32), engine(True, requests, blocks, 32)
    for made in (plain, ours):
        for _ in range(5):
            timed_step(made)
    pairs = [(timed_step(plain), timed_step(ours)) for _ in range(steps)]
    plain_us, ours_us = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    return {
        "running": requests,
        "preempted per step": 0,
        "plain us": plain_us,
        "ours us": ours_us,
        "difference us": statistics.median(o - p for p, o in pairs) * 1e6,
        "ratio": ours_us / plain_us,
    }


def victim_steps(victims: int, blocks: int, rounds: int) -> dict[str, Any]:
    """Time per victim of `blocks` blocks that `victims` preemptions in one step add over plain vLLM."""
    added = []
    for _ in range(rounds):
        spent = {}
        for ours in (False, True):
            made = engine(ours, victims, victims * (blocks + 2) + 16, blocks * BLOCK_SIZE - 8)
            scheduler = made.scheduler
            scheduler._inside_schedule = True
            requests = [scheduler.running.pop() for _ in range(victims)]
            start = time.perf_counter()
            for request in requests:
                scheduler._preempt_request(request, 0.0)
            spent[ours] = time.perf_counter() - start
        added.append((spent[True] - spent[False]) / victims)
    return {"victims": victims, "blocks": blocks, "ms per victim": statistics.median(added) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps per size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per victim size (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("reports/bench-scheduler.json"))
    options = parser.parse_args()
    quiet = [quiet_steps(requests, options.steps) for requests in (1, 16, 256, 1024)]
    victims = [victim_steps(n, 64, options.rounds) for n in (1, 8)]
    sizes = [victim_steps(1, blocks, options.rounds) for blocks in (16, 128, 1000, 2048, 8192)]
    slope, intercept = statistics.linear_regression([s["blocks"] for s in sizes], [s["ms per victim"] for s in sizes])

    console = Console()
    for title, rows in (("Steps without preemption", quiet), ("Preemptions in one step", victims), ("A victim", sizes)):
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    console.print(f"A victim costs {intercept:.3f} ms and {slope * 1e3:.3f} us a block.")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "quiet": quiet,
        "victims": victims,
        "sizes": sizes,
        "us per block": slope * 1e3,
        "ms per victim": intercept,
    }
    options.output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
