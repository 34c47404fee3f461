"""What a step trace proves: computed again, restored, and the lanes."""

import json
from pathlib import Path

import pytest

from pd_integration.trace import (
    LOADING,
    ON_HOST,
    PREEMPTED,
    QUEUED,
    RECOMPUTING,
    RUNNING,
    WAITING,
    History,
    Segment,
    Step,
    histories,
    read_trace,
)


def step(t: float, tokens: dict | None = None, status: dict | None = None, preempted: list | None = None) -> Step:
    return Step(t, int(t), tokens or {}, preempted or [], status or {}, running=1, waiting=0, usage=0.5)


def history(*steps: Step) -> History:
    return histories(list(steps))["a"]


def test_request_that_is_never_preempted_computes_nothing_again() -> None:
    seen = history(
        step(0, status={"a": "WAITING"}),
        step(1, status={"a": "WAITING_FOR_REMOTE_KVS"}),
        step(2, {"a": [9, 1, 0]}, {"a": "RUNNING"}),
        step(3, {"a": [10, 1, 0]}),
        step(4, status={"a": "GONE"}),
    )
    assert seen.recomputed == 0
    assert seen.high_water == 11
    assert seen.preemptions == []
    assert seen.lane == [Segment(QUEUED, 0, 1), Segment(WAITING, 1, 2), Segment(RUNNING, 2, 4)]


def test_recompute_is_counted_up_to_the_high_water_mark() -> None:
    """30 tokens were loaded from Prefill and 2 computed; after the preemption 32 of 40 scheduled tokens are old."""
    seen = history(
        step(0, {"a": [30, 1, 0]}, {"a": "RUNNING"}),
        step(1, {"a": [31, 1, 0]}),
        step(2, status={"a": "PREEMPTED"}, preempted=["a"]),
        step(4, {"a": [0, 16, 0]}, {"a": "RUNNING"}),
        step(5, {"a": [16, 16, 0]}),
        step(6, {"a": [32, 8, 0]}),
        step(7, status={"a": "GONE"}),
    )
    assert seen.recomputed == 32
    [event] = seen.preemptions
    assert (event.computed, event.resumed_at, event.recomputed, event.restored) == (32, 0, 32, False)
    kinds = [(segment.kind, segment.start, segment.end) for segment in seen.lane]
    assert kinds == [(RUNNING, 0, 2), (PREEMPTED, 2, 4), (RECOMPUTING, 4, 6), (RUNNING, 6, 7)]


def test_restored_request_was_on_the_host_while_it_waited() -> None:
    seen = history(
        step(0, {"a": [30, 1, 0]}, {"a": "RUNNING"}),
        step(2, status={"a": "PREEMPTED"}, preempted=["a"]),
        step(5, status={"a": "WAITING_FOR_REMOTE_KVS"}),
        step(6, {"a": [31, 1, 0]}, {"a": "RUNNING"}),
        step(7, status={"a": "GONE"}),
    )
    assert seen.recomputed == 0
    assert [event.restored for event in seen.preemptions] == [True]
    assert [segment.kind for segment in seen.lane] == [RUNNING, ON_HOST, LOADING, RUNNING]


def test_restore_within_a_step_is_still_a_wait_on_the_host() -> None:
    seen = history(
        step(0, {"a": [30, 1, 0]}),
        step(2, status={"a": "PREEMPTED"}, preempted=["a"]),
        step(5, {"a": [31, 1, 0]}, {"a": "RUNNING"}),
    )
    assert seen.lane == [Segment(RUNNING, 0, 2), Segment(ON_HOST, 2, 5)]


def test_partial_restore_is_a_recompute() -> None:
    seen = history(step(0, {"a": [30, 2, 0]}), step(1, preempted=["a"]), step(2, {"a": [20, 16, 0]}))
    assert seen.recomputed == 12
    assert not seen.preemptions[0].restored


def test_each_preemption_is_judged_by_its_own_resume() -> None:
    seen = history(
        step(0, {"a": [10, 1, 0]}),
        step(1, preempted=["a"]),
        step(2, {"a": [11, 1, 0]}),
        step(3, preempted=["a"]),
        step(4, {"a": [0, 12, 0]}),
    )
    assert [event.restored for event in seen.preemptions] == [True, False]
    assert seen.recomputed == 12


def test_preempted_and_scheduled_again_in_one_step() -> None:
    seen = history(step(0, {"a": [10, 1, 0]}), step(1, {"a": [0, 11, 0]}, preempted=["a"]))
    assert [(event.computed, event.resumed_at) for event in seen.preemptions] == [(11, 0)]


def test_request_that_never_comes_back_is_not_restored() -> None:
    seen = history(
        step(0, {"a": [10, 1, 0]}),
        step(1, preempted=["a"]),
        step(2, status={"a": "GONE"}),
        step(3, status={"b": "WAITING"}),
    )
    assert [(event.resumed_at, event.restored, event.recomputed) for event in seen.preemptions] == [(None, False, 0)]
    assert seen.lane == [Segment(RUNNING, 0, 1), Segment(PREEMPTED, 1, 2)]


def test_rejected_drafts_are_not_computed_again() -> None:
    """Three drafts at 11 to 13, two rejected: the next step starts at 12."""
    seen = history(step(0, {"a": [10, 4, 3]}), step(1, {"a": [12, 4, 3]}))
    assert seen.recomputed == 0


def test_requests_are_told_apart() -> None:
    both = histories([step(0, {"a": [0, 8, 0], "b": [0, 4, 0]}), step(1, preempted=["b"]), step(2, {"b": [0, 4, 0]})])
    assert {name: seen.recomputed for name, seen in both.items()} == {"a": 0, "b": 4}


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


LINE = json.dumps(
    {"t": 1.0, "step": 1, "tokens": {}, "preempted": [], "status": {}, "running": 0, "waiting": 0, "usage": 0}
)


def test_last_line_may_be_cut_off(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "trace", LINE + "\n", LINE[:20]))) == 1


@pytest.mark.parametrize("broken", [LINE[:20], '{"t": 1.0}'])
def test_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path / "trace", LINE + "\n", broken + "\n", LINE + "\n")
    with pytest.raises(ValueError, match=r"trace:2 is not a line of a step trace"):
        read_trace(path)
