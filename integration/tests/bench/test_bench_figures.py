"""Figures of a decode run, from small traces written by hand."""

from dataclasses import replace

import pytest

from pd_integration.bench.figures import (
    ActiveTime,
    figures,
    percentile,
    preempted_numbers,
    ratio,
    request_number,
    resumptions,
)
from pd_integration.trace import Step


def step(t: float, tokens: dict[str, list[int]], preempted: tuple[str, ...] = ()) -> Step:
    return Step(t, 0, tokens, list(preempted), {}, 1, 0, 0.5)


A, B = "0.0-8c0dab12", "1.0-17aa32f0"
# B is preempted in the second step and waits for one more; in the fourth it computes a token again and gets its next.
STEPS = [
    step(1.0, {A: [4, 1, 0], B: [7, 1, 0]}),
    step(2.0, {A: [5, 1, 0]}, (B,)),
    step(3.0, {A: [6, 1, 0]}),
    step(4.0, {A: [7, 1, 0], B: [7, 2, 0]}),
]
TIMES = [[1.5, 2.5, 3.5, 4.5], [1.5, 4.5]]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([3.0, 1.0, 2.0], 99, 3.0), (range(1, 101), 99, 99), ([5.0], 50, 5.0), ([], 50, None)],
)
def test_percentile_is_one_of_the_values(values, percent, expected) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(
    ("value", "base", "expected"), [(3.0, 2.0, 1.5), (3.0, 0.0, None), (None, 2.0, None), (3.0, None, None)]
)
def test_ratio_without_a_base_is_missing(value, base, expected) -> None:
    assert ratio(value, base) == expected


def test_number_of_a_request_sent_on_after_some_tokens() -> None:
    assert request_number("12.345-8c0dab12") == 12


def test_resumption_counts_seconds_and_steps_up_to_the_next_token() -> None:
    assert resumptions(TIMES, STEPS) == [(2.5, 3)]


def test_request_that_never_got_another_token_is_no_resumption() -> None:
    assert resumptions([TIMES[0], [1.5]], STEPS) == []


def test_only_requests_that_were_preempted_count_as_such() -> None:
    assert preempted_numbers(STEPS) == {1}


def test_figures_of_a_run() -> None:
    found = figures(TIMES, [1.0, 1.0], STEPS)
    assert found["output_tokens"] == 6
    assert found["seconds"] == 3.5
    assert found["tokens_per_s"] == pytest.approx(6 / 3.5)
    assert (found["steps"], found["scheduled_tokens"], found["preemptions"]) == (4, 7, 1)
    assert found["computed_again"] == 1
    assert found["kv_in_use"] == 0.5
    assert found["loading_s"] == 0
    assert (found["itl_p50_ms"], found["itl_p99_ms"]) == (1000.0, 3000.0)
    assert (found["preempted_itl_p50_ms"], found["preempted_itl_p99_ms"]) == (3000.0, 3000.0)
    assert (found["resume_s"], found["resume_steps"]) == (2.5, 3)


def test_time_of_a_load_behind_the_step_is_told_apart() -> None:
    steps = [*STEPS[:2], step(3.0, {A: [6, 1, 0]}), *STEPS[3:]]
    steps[2] = replace(steps[2], status={B: "WAITING_FOR_REMOTE_KVS"})
    assert figures(TIMES, [1.0, 1.0], steps)["loading_s"] == 1.0


def test_figures_without_preemptions_have_nothing_about_them() -> None:
    found = figures([TIMES[0]], [1.0], [step(1.0, {A: [4, 1, 0]})])
    assert found["preempted_itl_p99_ms"] is found["resume_s"] is None
    assert found["preemptions"] == found["computed_again"] == 0


def test_pauses_are_taken_out_of_the_times_behind_them() -> None:
    active = ActiveTime([(10.0, 12.0), (20.0, 25.0)])
    assert [active(t) for t in (9.0, 10.0, 12.0, 19.0, 25.0, 30.0)] == [9.0, 10.0, 10.0, 17.0, 18.0, 23.0]
    assert ActiveTime([])(5.0) == 5.0
