"""What vLLM's scheduler really does, step by step, written as JSON lines: the demo's witness.

It wraps `schedule` of vLLM's base Scheduler, so it sees any scheduler class, and it reads only what vLLM hands to its
own workers (`SchedulerOutput`) and the requests' own state. It knows nothing of a KV connector's bookkeeping.

A line is written for each step that schedules tokens or changes a request's status:

    {"t": 1764450000.123456,        seconds since the epoch, when schedule() returned
     "step": 17,                    counts lines with scheduled tokens
     "tokens": {"cmpl-a-0-1f": [31, 1, 0]},   request: [tokens computed before this step, tokens scheduled in it,
                                              how many of those are drafts that may be rejected]
     "preempted": ["cmpl-b-0-2e"],  preempted in this step
     "status": {"cmpl-b-0-2e": "PREEMPTED"},   requests whose status changed; GONE when the scheduler forgot it
     "running": 5, "waiting": 2,    queue lengths
     "usage": 0.93}                 share of the device's KV blocks in use

Request ids are vLLM's internal ones: the id of the API server's request plus a suffix.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

GONE = "GONE"


def scheduled_ranges(output: SchedulerOutput) -> dict[str, list[int]]:
    """``{request id: [tokens computed before the step, tokens scheduled in it, drafts among them]}``."""
    cached = output.scheduled_cached_reqs
    start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drafts = output.scheduled_spec_decode_tokens
    return {
        req_id: [start[req_id], count, len(drafts.get(req_id, ()))]
        for req_id, count in output.num_scheduled_tokens.items()
    }


class StepTrace:
    """Writes one scheduler's trace to ``file``."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._step = 0
        self._status: dict[str, str] = {}
        self._preemptions: dict[str, int] = {}

    def after_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Write what ``schedule`` has just decided."""
        tokens = scheduled_ranges(output)
        status, preempted = self._changes(scheduler)
        if not (tokens or status or preempted):
            return
        self._step += bool(tokens)
        running, waiting = scheduler.get_request_counts()
        line = {
            "t": round(time.time(), 6),
            "step": self._step,
            "tokens": tokens,
            "preempted": preempted,
            "status": status,
            "running": running,
            "waiting": waiting,
            "usage": round(scheduler.kv_cache_manager.usage, 4),
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _changes(self, scheduler: Scheduler) -> tuple[dict[str, str], list[str]]:
        """Statuses that differ from the last step's, and the requests preempted since then."""
        status = {req_id: str(request.status) for req_id, request in scheduler.requests.items()}
        changed = {req_id: now for req_id, now in status.items() if self._status.get(req_id) != now}
        changed.update(dict.fromkeys(self._status.keys() - status.keys(), GONE))
        counts = {req_id: request.num_preemptions for req_id, request in scheduler.requests.items()}
        preempted = [req_id for req_id, count in counts.items() if count > self._preemptions.get(req_id, 0)]
        self._status, self._preemptions = status, counts
        return changed, preempted


def install(path: str) -> None:
    """Trace every scheduler that this process creates from now on, to ``path``; a second call does nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule: Callable[..., Any] = Scheduler.schedule
    if getattr(schedule, "writes_step_trace", False):
        return

    traces: dict[Scheduler, StepTrace] = {}

    @functools.wraps(schedule)
    def traced(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = schedule(self, *args, **kwargs)
        if self not in traces:
            # Line by line, because the process is ended by a signal; opened here, in the engine core alone.
            traces[self] = StepTrace(open(path, "a", buffering=1, encoding="utf-8"))  # noqa: SIM115
        traces[self].after_schedule(self, output)
        return output

    traced.writes_step_trace = True  # type: ignore[attr-defined]
    Scheduler.schedule = traced  # type: ignore[method-assign]
