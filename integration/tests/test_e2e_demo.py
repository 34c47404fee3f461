"""The demo's workload on real servers, real Mooncake and the real proxy, with two more arms.

Without pressure, Mooncake and the proxy must give the plain server's outputs on their own; and a host pool too small
for some victims must leave them to vLLM's recompute, with the same outputs.
"""

from pathlib import Path

import pytest
from rich.console import Console

from pd_integration import report
from pd_integration.arms import ArmRun
from pd_integration.demo import MIN_PREEMPTIONS, Outcome, Settings, run
from pd_integration.deployment import NO_PRESSURE, OFF, ON, ON_SYNC, SMALL_POOL, Arm
from pd_integration.progress import Progress

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ARMS = (NO_PRESSURE, OFF, ON, ON_SYNC, SMALL_POOL)
KEEPS_ALL = (ON, ON_SYNC)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def outcome(run_dir: Path) -> Outcome:
    return run(Settings(arms=ARMS), run_dir, Progress(Console()))


def of(outcome: Outcome, arm: Arm) -> ArmRun:
    return outcome.runs[ARMS.index(arm)]


def log(run_dir: Path, arm: Arm) -> str:
    return (run_dir / f"arm{ARMS.index(arm) + 1}" / "decode.log").read_text()


def test_demo_finds_no_failure(outcome: Outcome) -> None:
    assert outcome.failures() == []


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_outputs_are_the_plain_servers(outcome: Outcome, arm: Arm) -> None:
    ours = {result.request.id: result.token_ids for result in of(outcome, arm).results}
    assert len(ours) == outcome.settings.requests >= 32
    assert ours == {result.request.id: result.token_ids for result in outcome.reference}


def test_outputs_vary(outcome: Outcome) -> None:
    """Or wrong KV could go unseen: most requests must give many different tokens, and not those of another request."""
    outputs = [tuple(result.token_ids) for result in outcome.reference]
    assert len(set(outputs)) == len(outputs)
    assert sorted(len(set(ids)) for ids in outputs)[len(outputs) // 4] >= 20


def test_no_pressure_means_no_preemption(outcome: Outcome) -> None:
    quiet = of(outcome, NO_PRESSURE)
    assert quiet.preemptions == []
    assert quiet.recomputed_tokens == 0


def test_vllm_alone_computes_preempted_requests_again(outcome: Outcome) -> None:
    alone = of(outcome, OFF)
    assert alone.preemptions
    assert not any(event.restored for event in alone.preemptions)
    assert alone.recomputed_tokens >= 100 * len(alone.preemptions)


@pytest.mark.parametrize("arm", KEEPS_ALL, ids=lambda arm: arm.name)
def test_connector_restores_every_preempted_request(outcome: Outcome, arm: Arm) -> None:
    kept = of(outcome, arm)
    assert len(kept.preemptions) >= MIN_PREEMPTIONS
    assert all(event.restored for event in kept.preemptions)
    assert kept.recomputed_tokens == 0


@pytest.mark.parametrize("arm", KEEPS_ALL, ids=lambda arm: arm.name)
def test_connectors_figures_agree_with_the_trace(outcome: Outcome, arm: Arm) -> None:
    kept = of(outcome, arm)
    figures = kept.figures()
    assert figures["offloaded"] == figures["restored"] == len(kept.preemptions)
    assert figures["fallbacks"] == 0
    assert figures["blocks_stored"] == figures["blocks_loaded"] > 0
    assert kept.offload["host_blocks_used"] == 0  # nothing leaks
    assert max(sample.used for sample in kept.host_samples) > 0


def test_every_output_token_but_the_last_is_scheduled_once(outcome: Outcome) -> None:
    """The last prompt token is computed on Decode again, the last output token never: one each, so they cancel out."""
    expected = sum(request.max_tokens for request in (result.request for result in outcome.reference))
    for arm in (NO_PRESSURE, *KEEPS_ALL):
        assert of(outcome, arm).figures()["tokens_scheduled"] == expected


def test_small_host_pool_leaves_some_to_recompute(outcome: Outcome) -> None:
    small = of(outcome, SMALL_POOL)
    assert small.figures()["fallbacks"] > 0
    assert small.figures()["restored"] > 0
    assert any(not event.restored for event in small.preemptions)
    assert small.recomputed_tokens > 0


@pytest.mark.parametrize(("arm", "scheduler"), [(ON, "AsyncRecomputeScheduler"), (ON_SYNC, "RecomputeScheduler")])
def test_flag_selects_the_scheduler(outcome: Outcome, run_dir: Path, arm: Arm, scheduler: str) -> None:
    assert f"using recompute_scheduler.{scheduler}" in log(run_dir, arm)


def test_log_tells_an_operator_that_offload_is_active(outcome: Outcome, run_dir: Path) -> None:
    for line in (
        "Recompute preemption offload enabled for request cmpl-r",
        "Created recompute offload state for request cmpl-r",
        "Prepared recompute offload H2D load for request cmpl-r",
    ):
        assert line in log(run_dir, ON)
        assert line not in log(run_dir, OFF)
    assert "CPU cache free blocks are insufficient for request cmpl-r" in log(run_dir, SMALL_POOL)


def test_report_is_written(outcome: Outcome, tmp_path: Path) -> None:
    assert [path.name for path in report.write(outcome, tmp_path)] == ["demo.json", "demo.html"]
