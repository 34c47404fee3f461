"""The plugin: nothing without its environment variables, each switch once with them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.scheduler import Scheduler

from pd_integration import plugin
from pd_integration.plugin import ASYNC_SCHEDULING, STEP_TRACE, register
from pd_integration.trace import read_trace


def config(**flags: bool) -> SimpleNamespace:
    parallel_config = SimpleNamespace(worker_cls="as it was")
    return SimpleNamespace(scheduler_config=SimpleNamespace(**flags), parallel_config=parallel_config)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> type[CpuPlatform]:
    """vLLM's CPU platform with the one line of its check that matters here."""

    def check_and_update_config(cls: type, vllm_config: SimpleNamespace) -> None:
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.checks = getattr(vllm_config, "checks", 0) + 1

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    monkeypatch.delenv(ASYNC_SCHEDULING, raising=False)
    monkeypatch.delenv(STEP_TRACE, raising=False)
    return CpuPlatform


def test_nothing_changes_without_the_variables(platform: type[CpuPlatform]) -> None:
    schedule = Scheduler.schedule
    register()
    vllm_config = config(async_scheduling=True)
    platform.check_and_update_config(vllm_config)
    assert vllm_config.scheduler_config.async_scheduling is False
    assert Scheduler.schedule is schedule


def test_async_scheduling_stays_on_and_the_platforms_check_runs_once(
    platform: type[CpuPlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASYNC_SCHEDULING, "1")
    register()
    register()
    vllm_config = config(async_scheduling=True)
    platform.check_and_update_config(vllm_config)
    assert vllm_config.scheduler_config.async_scheduling is True
    assert vllm_config.checks == 1


@pytest.mark.parametrize(
    ("can", "worker"), [(True, "as it was"), (False, "pd_integration.async_worker.AsyncCPUWorker")]
)
def test_another_worker_runs_only_where_vllms_own_cannot(
    platform: type[CpuPlatform], monkeypatch: pytest.MonkeyPatch, can: bool, worker: str
) -> None:
    monkeypatch.setattr(plugin, "streams_can_wait", lambda: can)
    plugin.keep_async_scheduling()
    vllm_config = config(async_scheduling=True)
    platform.check_and_update_config(vllm_config)
    assert vllm_config.parallel_config.worker_cls == worker


def test_trace_is_written_for_every_scheduler_class(
    platform: type[CpuPlatform], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"a": 8},
        scheduled_spec_decode_tokens={},
    )

    def schedule(self: Scheduler, throttle_prefills: bool = False) -> SimpleNamespace:
        return output

    class OtherScheduler(Scheduler):
        def __init__(self) -> None:
            self.requests = {"a": SimpleNamespace(status="RUNNING", num_preemptions=0)}
            self.kv_cache_manager = SimpleNamespace(usage=0.5)
            self.running, self.waiting, self.kv_holding_waiting, self.skipped_waiting = [1], [], [], []

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setenv(STEP_TRACE, str(tmp_path / "trace.jsonl"))
    register()
    register()
    scheduler = OtherScheduler()
    assert scheduler.schedule(throttle_prefills=True) is output
    [step] = read_trace(tmp_path / "trace.jsonl")
    assert step.tokens == {"a": [0, 8, 0]}
    assert step.status == {"a": "RUNNING"}
