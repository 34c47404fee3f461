"""How the product was before each of its repairs, as patches of the running process."""

from vllm.v1.core.sched.scheduler import Scheduler

from npu_copy import CopyEngine, Direction
from offload_connector.manager import OffloadManager
from recompute_scheduler import RecomputePreemption


def no_wait_for_loads(monkeypatch):
    """A failure within a step was reported when the copy had ended, not before the step's tokens left."""
    wait = CopyEngine.wait

    def wait_for_stores(self, job, timeout):
        if all(queued.job != job for queued in self._jobs[Direction.LOAD]):
            wait(self, job, timeout)

    monkeypatch.setattr(CopyEngine, "wait", wait_for_stores)


def any_single_group_loads_within_the_step(monkeypatch):
    monkeypatch.setattr(OffloadManager, "_loads_within_step", lambda self, _: len(self._groups) == 1)


def resets_keep_what_was_saved(monkeypatch):
    def reset(self, *args, **kwargs):
        return Scheduler.reset_prefix_cache(self, *args, **kwargs)

    monkeypatch.setattr(RecomputePreemption, "reset_prefix_cache", reset)


def standstills_are_not_resolved(monkeypatch):
    monkeypatch.setattr(RecomputePreemption, "_resolve_standstill", lambda self: None)
