"""Figures and verdicts of the demo, from synthetic runs."""

import pytest

from pd_integration.arms import ArmRun, client_id, percentile
from pd_integration.demo import MIN_PREEMPTIONS, Outcome, Settings
from pd_integration.deployment import OFF, ON
from pd_integration.table import ROWS, cells
from pd_integration.trace import Step
from pd_integration.workload import Request, Result

ROOMY = {"host_blocks_total": 640.0, "host_blocks_high_water": 100.0}
FULL = {"host_blocks_total": 640.0, "host_blocks_high_water": 639.0}


def result(name: str = "r0", ids: tuple[int, ...] = (5, 6)) -> Result:
    return Result(Request(name, "x", len(ids)), 100.0, list(ids), [101.0, 102.0], [1, 1])


def step(t: float, tokens: dict | None = None, preempted: tuple = ()) -> Step:
    return Step(t, int(t), tokens or {}, list(preempted), {}, 1, 0, 0.5)


def run(
    arm=ON, preemptions: int = MIN_PREEMPTIONS, lost: bool = False, offload: dict | None = None, ids=(5, 6)
) -> ArmRun:
    """A run of one request, preempted so often; if ``lost``, computed again from its first token after the last one."""
    request, position = "cmpl-r0-0-abcd1234", 40
    steps = [step(0, {request: [39, 1, 0]})]
    for number in range(preemptions):
        steps.append(step(2 * number + 1, preempted=(request,)))
        start = 0 if lost and number == preemptions - 1 else position
        steps.append(step(2 * number + 2, {request: [start, 1, 0]}))
        position += 1
    return ArmRun(arm, [result(ids=ids)], steps, ROOMY if offload is None else offload)


def failures(*runs: ArmRun, reference: tuple[int, ...] = (5, 6)) -> list[str]:
    return Outcome(Settings(), [result(ids=reference)], list(runs)).failures()


def test_good_run_has_no_failures() -> None:
    assert failures(run(OFF, offload={}), run(ON)) == []


def test_differing_output_is_named_with_its_first_token() -> None:
    assert failures(run(OFF, offload={}, ids=(5, 7))) == [
        "vLLM's own recompute: outputs differ from the plain server: r0 (token 1)"
    ]


def test_too_few_preemptions_with_the_connector() -> None:
    assert failures(run(ON, preemptions=9)) == ["connector: 9 preemptions, at least 10 expected"]
    assert failures(run(OFF, preemptions=0, offload={})) == []


def test_recompute_with_room_on_the_host_is_a_failure() -> None:
    [failure] = failures(run(ON, lost=True))
    assert failure == "connector: recomputed although the host had room: r0 (1 tokens)"


def test_recompute_without_room_on_the_host_is_the_fallback() -> None:
    assert failures(run(ON, lost=True, offload=FULL)) == []


def test_recompute_without_the_connector_is_what_vllm_does() -> None:
    assert failures(run(OFF, lost=True, offload={})) == []


def test_figures_are_the_traces_and_the_connectors() -> None:
    metrics = {"preempted_offloaded": 10, "preempted_restored": 9, "bytes_stored": 3 << 20, "fallback:no_room": 1}
    figures = run(ON, lost=True, offload=metrics).figures()
    assert figures["preemptions"] == 10
    assert figures["tokens_recomputed"] == 1
    assert figures["tokens_scheduled"] == 11
    assert figures["decode_steps"] == 11
    assert (figures["offloaded"], figures["restored"], figures["fallbacks"]) == (10, 9, 1)
    assert figures["mib_stored"] == 3.0
    assert figures["wall_s"] == 2.0


def test_table_has_a_row_per_figure_and_dashes_without_the_connector() -> None:
    rows = dict(cells([run(OFF, offload={}), run(ON)]))
    assert len(rows) == len(ROWS)
    assert set(run(ON).figures()) == set(ROWS)
    assert rows["KV restored"] == ["-", "0"]
    assert rows["preemptions"] == ["10", "10"]


@pytest.mark.parametrize(
    ("internal", "expected"), [("cmpl-r007-0-8c0dab12", "r007"), ("cmpl-my-request-1-8c0dab12", "my-request")]
)
def test_internal_ids_are_joined_to_the_clients(internal: str, expected: str) -> None:
    assert client_id(internal) == expected


def test_percentile_of_few_values() -> None:
    assert percentile([], 50) == 0.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
