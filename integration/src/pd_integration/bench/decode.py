"""What preemption costs a Decode node, against every alternative: `python -m pd_integration.bench.decode`.

Each cell of the grid runs all its arms on real engines, with the same requests in the same order. The engines take
turns of a quarter of a second; their clocks stand still while others run, though transfers under way do not.
Cells "made up" have the Decode engine alone: vLLM's DecodeBenchConnector stands in for Prefill, writing some values as
the prompts' KV. Cells "Prefill" have a real Prefill server, and the KV comes over Mooncake.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pd_integration.bench import record
from pd_integration.bench.cells import (
    ARM_AMPLE,
    ARM_FREE,
    ARM_OURS,
    ARM_RECOMPUTE,
    BUDGET,
    GRID,
    MAX_NUM_SEQS,
    PD,
    Arm,
    Cell,
    Source,
    write_bench_model,
)
from pd_integration.bench.decode_engine import Job, Outcome
from pd_integration.bench.decode_engine import run as run_engine
from pd_integration.bench.figures import ActiveTime, figures, ratio
from pd_integration.bench.prefill import PrefillClient, prefill_server
from pd_integration.bench.process import Task, take_turns
from pd_integration.bench.tables import arm_rows, cell_title, summary_rows
from pd_integration.families.run import prepare_environment
from pd_integration.servers import terminate_as_interrupt
from pd_integration.trace import read_trace

CELL_TIMEOUT_S = 600.0


class Bench:
    """Runs the arms of a cell, each in a process of its own, and remembers which ones this platform refuses."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.model = write_bench_model(run_dir / "model")
        self.refused: dict[str, str] = {}

    def run(self, cell: Cell, arms: Sequence[Arm], prefill: PrefillClient | None) -> list[dict[str, Any]]:
        """The rows of ``arms``, which take turns; those that the platform refuses have none.

        Raises:
            RuntimeError: an engine failed or took too long; with its traceback or the place of its log.
        """
        tasks, traces = [], []
        arms = [arm for arm in arms if arm.name not in self.refused]
        for arm in arms:
            name = f"{cell.prompt}-{cell.pressure:g}-{cell.source.name}-{arm.name}".replace(" ", "_")
            traces.append(self._run_dir / f"{name}.jsonl")
            tasks.append(
                Task(run_engine, Job(self.model, cell, arm, traces[-1], prefill), self._run_dir / f"{name}.log")
            )
        rows = []
        for arm, trace, outcome in zip(arms, traces, take_turns(tasks, CELL_TIMEOUT_S), strict=True):
            if outcome.refused is not None:
                self.refused[arm.name] = outcome.refused
            else:
                rows.append({"arm": arm.name, **_row(outcome, trace)})
        return rows


def _row(outcome: Outcome, trace: Path) -> dict[str, Any]:
    active = ActiveTime(outcome.pauses)
    steps = [replace(step, t=active(step.t)) for step in read_trace(trace)]
    times = [[active(t) for t in own] for own in outcome.times]
    prefix = "vllm:recompute_offload_"
    return {
        **figures(times, [active(t) for t in outcome.sent], steps),
        "cpu_s": outcome.cpu_s,
        "resent": len(outcome.resent_tokens),
        "resent_tokens": sum(outcome.resent_tokens),
        "offload": {key.removeprefix(prefix): v for key, v in outcome.metrics.items() if key.startswith(prefix)},
        "tokens": outcome.tokens,
        "schedule": [[step.tokens, step.preempted] for step in steps],
    }


def finish_cell(cell: Cell, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The cell with its rows: ratios put in, token lists and schedules replaced by what their comparison says."""
    by_arm = {row["arm"]: row for row in rows}
    ample = by_arm[ARM_AMPLE.name]
    for row in rows:
        row["throughput"] = ratio(row["tokens_per_s"], ample["tokens_per_s"])
        row["same_tokens"] = sum(a == b for a, b in zip(row["tokens"], ample["tokens"], strict=True))
    ours, free, recompute = (by_arm[arm.name] for arm in (ARM_OURS, ARM_FREE, ARM_RECOMPUTE))
    figures_of_cell = {
        "ours_to_free": ratio(ours["tokens_per_s"], free["tokens_per_s"]),
        "ours_to_free_cpu": ratio(free["cpu_s"], ours["cpu_s"]),
        "copy_share": ratio(
            sum(ours["offload"].get(f"{copy}_seconds", 0.0) for copy in ("store", "load")), ours["seconds"]
        ),
        "same_schedule_as_free": [len(t) for t, _ in ours["schedule"]] == [len(t) for t, _ in free["schedule"]],
        "resume_gain": ratio(recompute["resume_s"], ours["resume_s"]),
        "resume_gain_steps": ratio(recompute["resume_steps"], ours["resume_steps"]),
        "itl_p99_to_recompute": ratio(ours["itl_p99_ms"], recompute["itl_p99_ms"]),
    }
    for row in rows:
        del row["tokens"], row["schedule"]
    head = {**asdict(cell), "source": cell.source.value}
    return {**head, "decode_blocks": cell.blocks(cell.pressure), **figures_of_cell, "rows": rows}


def run(
    cells: Sequence[Cell], arms: Sequence[str], run_dir: Path, console: Console, save: Callable[[dict[str, Any]], Path]
) -> dict[str, Any]:
    """Run ``cells``; only the ``arms`` named, if any are, beside those that the ratios need. Save after each cell."""
    began = time.monotonic()
    bench = Bench(run_dir)
    needed = {arm.name for arm in (ARM_AMPLE, ARM_OURS, ARM_FREE, ARM_RECOMPUTE)}
    done: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": BUDGET, "refused": bench.refused}
    finished = done["cells"] = []
    for cell in cells:
        with _prefill(bench.model, cell, run_dir) as prefill:
            chosen = [arm for arm in cell.arms() if not arms or arm.name in needed | set(arms)]
            finished.append(finish_cell(cell, bench.run(cell, chosen, prefill)))
        done["seconds"] = time.monotonic() - began
        save(done)
        console.print(f"[{done['seconds']:.0f} s]", markup=False)
        record.show(record.table(cell_title(finished[-1]), arm_rows(finished[-1])))
    return done


def _prefill(model: Path, cell: Cell, run_dir: Path) -> AbstractContextManager[PrefillClient | None]:
    if cell.source is Source.PREFILL:
        return prefill_server(model, [cell], run_dir / "prefill.log")
    return nullcontext()


def read_cells(report: Path) -> list[dict[str, Any]]:
    """The cells of an earlier report."""
    return json.loads(report.read_text(encoding="utf-8"))["cells"]


def save_with(kept: Sequence[dict[str, Any]], reports: Path, done: dict[str, Any]) -> Path:
    """Write the report of ``done``, and of those cells of ``kept`` that it does not have, in the grid's order."""
    order = [(cell.source.value, cell.pressure, cell.prompt) for cell in (*PD, *GRID)]
    cells = {(cell["source"], cell["pressure"], cell["prompt"]): cell for cell in (*kept, *done["cells"])}
    return record.write("decode", {**done, "cells": [cells[key] for key in order if key in cells]}, reports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, action="append", help="only cells of this prompt length; repeat for more")
    parser.add_argument("--pressure", type=float, action="append", help="only cells of this pressure; repeat for more")
    parser.add_argument("--source", choices=[source.name.lower() for source in Source], help="only cells of this kind")
    parser.add_argument("--arm", action="append", default=[], help="beside the four that ratios need; repeat for more")
    parser.add_argument("--add", action="store_true", help="keep the report's other cells, from an earlier run")
    parser.add_argument("--run-dir", type=Path, default=Path(".run/bench"), help="model, logs, traces; emptied first")
    parser.add_argument("--reports", type=Path, default=record.REPORTS)
    options = parser.parse_args()
    cells = [
        cell
        for cell in (*PD, *GRID)
        if (not options.prompt or cell.prompt in options.prompt)
        and (not options.pressure or cell.pressure in options.pressure)
        and (not options.source or cell.source.name.lower() == options.source)
    ]
    if not cells:
        parser.error("no cell of the grid is as the options say")
    prepare_environment()
    shutil.rmtree(options.run_dir, ignore_errors=True)
    options.run_dir.mkdir(parents=True)
    console = Console()
    kept = read_cells(options.reports / "bench-decode.json") if options.add else []
    with terminate_as_interrupt():
        done = run(cells, options.arm, options.run_dir, console, partial(save_with, kept, options.reports))
    record.show(record.table("The connector against its bound and against recompute", summary_rows(done["cells"])))
    for name, reason in done["refused"].items():
        console.print(f"{name} does not run on this platform: {reason}", markup=False, soft_wrap=True)
    console.print(f"wrote {options.reports / 'bench-decode.json'}", markup=False)


if __name__ == "__main__":
    main()
