"""Cells of a decode report: what is said of them, and how runs are joined."""

import json
import sys
from pathlib import Path

import pytest

from pd_integration.bench import decode
from pd_integration.bench.cells import ARM_AMPLE, ARM_FREE, ARM_OURS, ARM_RECOMPUTE, Cell
from pd_integration.bench.decode import finish_cell, read_cells, save_with


def row(arm, **figures) -> dict:
    common = {"tokens_per_s": 100.0, "cpu_s": 10.0, "seconds": 20.0, "resume_s": None, "resume_steps": None}
    common |= {"itl_p99_ms": 20.0, "offload": {}, "tokens": [[1, 2], [3, 4]], "schedule": [[{"0.0-a": [0, 1, 0]}, []]]}
    return {"arm": arm.name, **common, **figures}


ROWS = {
    ARM_AMPLE: {},
    ARM_OURS: {
        "tokens_per_s": 95.0,
        "resume_s": 0.5,
        "resume_steps": 30,
        "offload": {"store_seconds": 0.1, "load_seconds": 0.3, "resume_seconds": 9.0},
    },
    ARM_FREE: {"tokens_per_s": 96.0, "cpu_s": 9.0, "tokens": [[1, 2], [3, 5]]},
    ARM_RECOMPUTE: {"tokens_per_s": 80.0, "resume_s": 2.0, "resume_steps": 90, "itl_p99_ms": 25.0},
}


def finished(**of_ours) -> dict:
    rows = {**ROWS, ARM_OURS: {**ROWS[ARM_OURS], **of_ours}}
    return finish_cell(Cell(256, 2.0), [row(arm, **figures) for arm, figures in rows.items()])


def test_ratios_of_a_cell() -> None:
    cell = finished()
    assert cell["ours_to_free"] == pytest.approx(95 / 96)
    assert cell["ours_to_free_cpu"] == pytest.approx(0.9)
    assert cell["copy_share"] == pytest.approx(0.02)
    assert (cell["resume_gain"], cell["resume_gain_steps"]) == (4.0, 3.0)
    assert cell["itl_p99_to_recompute"] == pytest.approx(0.8)
    assert [r["throughput"] for r in cell["rows"]] == pytest.approx([1.0, 0.95, 0.96, 0.8])
    assert [r["same_tokens"] for r in cell["rows"]] == [2, 2, 1, 2]


def test_same_schedule_is_the_same_number_of_requests_step_by_step() -> None:
    assert finished()["same_schedule_as_free"]
    assert not finished(schedule=[[{}, []]])["same_schedule_as_free"]


def test_without_preemptions_there_is_no_gain() -> None:
    assert finished(resume_s=None, resume_steps=None)["resume_gain"] is None


def test_cells_of_an_earlier_run_are_kept_unless_run_again(tmp_path: Path) -> None:
    def cell(prompt: int, pressure: float, run: int) -> dict:
        return {"prompt": prompt, "pressure": pressure, "source": "made up", "run": run}

    earlier = [cell(256, 2.0, 1), cell(1024, 1.25, 1), cell(256, 4.0, 1)]
    path = save_with(earlier, tmp_path, {"refused": {}, "cells": [cell(1024, 1.25, 2), cell(4096, 2.0, 2)]})
    found = [(c["prompt"], c["pressure"], c["run"]) for c in read_cells(path)]
    assert found == [(256, 2.0, 1), (4096, 2.0, 2), (1024, 1.25, 2), (256, 4.0, 1)]
    assert json.loads(path.read_text())["refused"] == {}


def test_option_keeps_the_cells_of_the_report_that_is_there(tmp_path: Path, monkeypatch) -> None:
    earlier = finished()
    save_with([earlier], tmp_path, {"refused": {}, "cells": []})

    def run(cells, arms, run_dir, console, save) -> dict:
        assert [cell.prompt for cell in cells] == [1024]
        done = {"refused": {}, "cells": [{**finished(), "prompt": 1024}]}
        save(done)
        return done

    monkeypatch.setattr(decode, "run", run)
    arguments = ["--prompt", "1024", "--pressure", "2", "--source", "made_up", "--reports", str(tmp_path)]
    for extra, prompts in ((["--add"], [256, 1024]), ([], [1024])):
        monkeypatch.setattr(sys, "argv", ["decode", *arguments, "--run-dir", str(tmp_path / "run"), *extra])
        decode.main()
        assert [cell["prompt"] for cell in read_cells(tmp_path / "bench-decode.json")] == prompts
