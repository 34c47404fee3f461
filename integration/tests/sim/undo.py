"""How the product was before each of its repairs, as patches of the running process."""

from vllm.v1.core.sched.scheduler import Scheduler

from npu_copy import CopyEngine, Direction
from offload_connector.within_step import WithinStep
from recompute_scheduler import RecomputePreemption


def no_wait_for_loads(monkeypatch):
    """A failure within a step was reported when the copy had ended, not before the step's tokens left."""
    wait = CopyEngine.wait

    def wait_for_stores(self, job, timeout):
        if all(queued.job != job for queued in self._jobs[Direction.LOAD]):
            wait(self, job, timeout)

    monkeypatch.setattr(CopyEngine, "wait", wait_for_stores)


def any_single_group_loads_within_the_step(monkeypatch):
    def one_group(self, groups, prefix_caching=False, overlapping_steps=False):
        self._can_be_found = not prefix_caching and len(groups) == 1
        self._overlapping_steps, self._goes_back = overlapping_steps, True

    monkeypatch.setattr(WithinStep, "__init__", one_group)


def loads_within_the_step_fill_the_prefix_cache(monkeypatch):
    _within_step(monkeypatch, prefix_caching=False)


def loads_within_overlapping_steps_are_recomputed(monkeypatch):
    _within_step(monkeypatch, overlapping_steps=False)


def _within_step(monkeypatch, **never):
    init = WithinStep.__init__
    monkeypatch.setattr(WithinStep, "__init__", lambda self, groups, **facts: init(self, groups, **{**facts, **never}))


def resets_keep_what_was_saved(monkeypatch):
    def reset(self, *args, **kwargs):
        return Scheduler.reset_prefix_cache(self, *args, **kwargs)

    monkeypatch.setattr(RecomputePreemption, "reset_prefix_cache", reset)


def standstills_are_not_resolved(monkeypatch):
    monkeypatch.setattr(RecomputePreemption, "_resolve_standstill", lambda self: None)
