"""Preemptions and waits under steady pressure, ours against plain vLLM: `python -m pd_integration.bench.thrash`.

vLLM's real scheduler is stepped without an engine over fixed traces, so every figure is a count and the same on every
machine. A request waits from its preemption to its next token.
"""

import argparse
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pd_integration.bench import record
from pd_integration.bench.scheduler import TRANSFER, StandInWorkers
from pd_integration.bench.tables import thrash_rows
from recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler
from recompute_scheduler.testing import BLOCK_SIZE, ScriptedEngine, make_config, make_kv_cache_config

CLASSES = {
    (False, False): Scheduler,
    (True, False): AsyncScheduler,
    (False, True): RecomputeScheduler,
    (True, True): AsyncRecomputeScheduler,
}
AT_ONCE = 16
BUDGET = 32
PRESSURES = (1.25, 2.0, 4.0)


@dataclass(frozen=True)
class Trace:
    """Requests that arrive as others end, `AT_ONCE` at a time; lengths in tokens, drawn evenly from the ranges."""

    name: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    seed: int

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, output) of every request."""
        draw = random.Random(self.seed)
        return [(draw.randint(*self.prompt), draw.randint(*self.output)) for _ in range(self.requests)]

    def blocks(self, pressure: float) -> int:
        """KV cache blocks such that `AT_ONCE` requests of mean length need `pressure` times as many at their end."""
        mean = sum(p + o for p, o in self.lengths()) / self.requests
        return int(AT_ONCE * mean / BLOCK_SIZE / pressure) + 1


TRACES = [Trace("short", 32, (100, 150), (100, 300), seed) for seed in range(3)]
TRACES += [Trace("long", 32, (300, 450), (300, 900), seed) for seed in range(2)]


@dataclass
class Figures:
    """Counts of one run, or sums over runs; `longest_wait` is the largest, in steps."""

    steps: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    longest_wait: int = 0
    waits: int = 0
    waited: int = 0
    scheduled_tokens: int = 0

    def add(self, other: "Figures") -> None:
        """Join another run."""
        for name, value in asdict(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "longest_wait" else mine + value)


def run(trace: Trace, pressure: float, asynchronous: bool, ours: bool) -> Figures:
    """Step one trace to its end."""
    config = make_config(
        async_scheduling=asynchronous,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=BUDGET,
        max_model_len=2048,
        kv_transfer_config=TRANSFER,
    )
    cls = CLASSES[asynchronous, ours]
    engine = ScriptedEngine(cls, config, make_kv_cache_config(trace.blocks(pressure)), StandInWorkers())
    scheduler, preempt = engine.scheduler, engine.scheduler._preempt_request
    since: dict[str, tuple[int, int]] = {}
    figures = Figures()

    def note(request, *args, **kwargs):
        figures.preemptions += 1
        since.setdefault(request.request_id, (figures.steps, request.num_output_tokens))
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = note  # type: ignore[method-assign]
    lengths = list(enumerate(trace.lengths()))
    while lengths or scheduler.has_unfinished_requests():
        while lengths and len(scheduler.requests) < AT_ONCE:
            index, (prompt, output) = lengths.pop(0)
            engine.add(f"r{index}", range(3, 3 + prompt), output)
            figures.output_tokens += output
        engine.step()
        figures.steps += 1
        for name, (step, tokens) in list(since.items()):
            request = scheduler.requests.get(name)
            if request is None or request.num_output_tokens > tokens:
                del since[name]
                figures.waits += 1
                figures.waited += figures.steps - step
                figures.longest_wait = max(figures.longest_wait, figures.steps - step)
    figures.scheduled_tokens = sum(sum(step.values()) for step in engine.trace)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=record.REPORTS)
    options = parser.parse_args()
    record.log_errors_only()
    rows: list[dict[str, Any]] = []
    for kind in ("short", "long"):
        for asynchronous in (False, True):
            for pressure in PRESSURES:
                for ours in (False, True):
                    total = Figures()
                    for trace in TRACES:
                        if trace.name == kind:
                            total.add(run(trace, pressure, asynchronous, ours))
                    scheduling = "async" if asynchronous else "sync"
                    arm = "ours" if ours else "vLLM"
                    head = {"requests": kind, "scheduling": scheduling, "pressure": pressure, "arm": arm}
                    rows.append({**head, **asdict(total)})
    record.show(record.table("Steady pressure: fixed traces, summed", thrash_rows(rows)))
    print(f"wrote {record.write('thrash', {'rows': rows}, options.reports)}")


if __name__ == "__main__":
    main()
