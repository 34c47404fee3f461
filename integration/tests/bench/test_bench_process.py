"""Processes that take turns, with functions that need no engine."""

import os
import time

import pytest

from pd_integration.bench.process import SLICE_S, Task, Turns, take_turns


def work(slices: int, turns: Turns) -> list[tuple[float, float]]:
    turns.begin()
    begun = time.time()
    for _ in range(slices):
        time.sleep(SLICE_S)
        turns.give()
    return [(begun, time.time()), *turns.pauses]


def fail(what: str, turns: Turns) -> None:
    if what == "die":
        os._exit(3)
    if what == "hang":
        turns.begin()
        time.sleep(60)
    raise ValueError(f"cannot {what}")


def test_one_runs_while_the_other_waits(tmp_path) -> None:
    first, second = take_turns([Task(work, 2, tmp_path / "a"), Task(work, 2, tmp_path / "b")], 60)
    for (begun, end), *pauses in (first, second):
        assert len(pauses) == 2
        assert sum(stop - start for start, stop in pauses) >= SLICE_S
        assert end - begun > 3 * SLICE_S
    # When the second begins, the first has been made to wait.
    assert first[1][0] <= second[0][0] <= first[1][1]


def test_error_of_a_task_comes_with_its_traceback_and_log(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"cannot compute(.|\n)*/log"):
        take_turns([Task(fail, "compute", tmp_path / "log")], 60)


def test_death_of_a_process_names_its_log(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"died, see .*/log"):
        take_turns([Task(fail, "die", tmp_path / "log")], 60)


def test_time_out_ends_those_that_wait_as_well(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="out of time"):
        take_turns([Task(work, 1, tmp_path / "a"), Task(fail, "hang", tmp_path / "b")], 5)
