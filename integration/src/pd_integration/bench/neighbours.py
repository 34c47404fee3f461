"""What transfers cost the requests that just run: `python -m pd_integration.bench.neighbours`.

On one real engine with room for everybody, two victims are preempted by hand again and again, one a step after the
other, so that the second is stored while the first is loaded, on the copy engine's background thread. In every other
cycle the copies move nothing. All else is the same, so the inter-token latencies of the neighbours in the same steps of
the two kinds of cycle differ by what the transfers cost.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pd_integration.bench import record
from pd_integration.bench.cells import ARM_OURS, BLOCK_BYTES, BLOCK_TOKENS, Cell, write_bench_model
from pd_integration.bench.decode_engine import Job, engine_arguments, stub_copies
from pd_integration.bench.figures import percentile, ratio
from pd_integration.bench.process import Task, Turns, take_turns
from pd_integration.bench.scheduler import preempt
from pd_integration.families.run import prepare_environment

NEIGHBOURS = 8
CYCLE = 6
BUSY = (0, 1, 2)
"""Steps of a cycle with transfers: store A; store B and load A; load B. In the others both run again."""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Load:
    """Two victims of ``tokens`` tokens beside `NEIGHBOURS` requests of that length, for so many cycles of each kind."""

    model: Path
    trace: Path
    tokens: int
    cycles: int


def run(load: Load, turns: Turns) -> dict[str, list[float]]:
    """Seconds of each step with transfers, in the cycles with copies and in those without."""
    from vllm import LLM, SamplingParams

    import offload_connector.within_step
    from npu_copy.backends.cpu import CpuBackend

    offload_connector.within_step.LOAD_WITHIN_STEP_BYTES = 0  # all loads behind the step, as large ones are
    copying = CpuBackend._copy_blocks
    cell = Cell(load.tokens, 0.25, requests=NEIGHBOURS + 2, output=2 * CYCLE * load.cycles + 40)
    llm = LLM(**engine_arguments(Job(load.model, cell, ARM_OURS, load.trace)))
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    output = SamplingParams(max_tokens=cell.output, temperature=0.0, ignore_eos=True, detokenize=False)
    for number in range(cell.requests):
        prompt = [3 + (number + at) % 200 for at in range(load.tokens)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, output)
    while len(scheduler.running) < cell.requests:
        engine.step()
    victims = list(scheduler.running)[-2:]

    seconds: dict[str, list[float]] = {"copies": [], "free": []}
    for cycle in range(2 * load.cycles):
        kind = ("copies", "free")[cycle % 2]
        if kind == "copies":
            CpuBackend._copy_blocks = copying  # type: ignore[method-assign]
        else:
            stub_copies()
        for step in range(CYCLE):
            start = time.perf_counter()
            if step < len(victims):
                scheduler.running.remove(victims[step])
                preempt(scheduler, [victims[step]])
            engine.step()
            if step in BUSY:
                seconds[kind].append(time.perf_counter() - start)
        for _ in range(CYCLE):
            if all(victim in scheduler.running for victim in victims):
                break
            engine.step()
        else:
            raise RuntimeError("a victim has not come back")
    return seconds


def row(tokens: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Latencies in milliseconds; a step's length is the inter-token latency of every neighbour in it."""
    copies, free = ([1e3 * s for s in seconds[kind]] for kind in ("copies", "free"))
    # A pair is the same step of two cycles that follow each other: slow drifts of the machine fall out.
    added = [a - b for a, b in zip(copies, free, strict=True)]
    return {
        "victim tokens": tokens,
        "victim MiB": tokens / BLOCK_TOKENS * BLOCK_BYTES / (1 << 20),
        "steps": len(copies),
        "p50 ms": percentile(copies, 50),
        "p50 without": percentile(free, 50),
        "p50 ratio": ratio(percentile(copies, 50), percentile(free, 50)),
        "p99 ms": percentile(copies, 99),
        "p99 without": percentile(free, 99),
        "p99 ratio": ratio(percentile(copies, 99), percentile(free, 99)),
        "median added ms": percentile(added, 50),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100, help="cycles of each kind (default: %(default)s)")
    parser.add_argument("--run-dir", type=Path, default=Path(".run/bench-neighbours"), help="emptied first")
    parser.add_argument("--reports", type=Path, default=record.REPORTS)
    options = parser.parse_args()
    prepare_environment()
    shutil.rmtree(options.run_dir, ignore_errors=True)
    options.run_dir.mkdir(parents=True)
    model = write_bench_model(options.run_dir / "model")
    rows = []
    for tokens in (256, 1024, 4096):
        load = Load(model, options.run_dir / f"{tokens}.jsonl", tokens, options.cycles)
        [seconds] = take_turns([Task(run, load, options.run_dir / f"{tokens}.log")], TIMEOUT_S)
        rows.append(row(tokens, seconds))
    record.show(record.table(f"Inter-token latency of {NEIGHBOURS} neighbours of two victims", rows))
    path = record.write("neighbours", {"neighbours": NEIGHBOURS, "rows": rows}, options.reports)
    Console().print(f"wrote {path}", markup=False)


if __name__ == "__main__":
    main()
