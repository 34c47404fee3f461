"""The trace's writer, on a stand-in for vLLM's scheduler with the fields that it reads."""

import io
import json
from types import SimpleNamespace

from pd_integration.step_trace import StepTrace


class FakeScheduler:
    """Requests by id, each with a status and a number of preemptions."""

    def __init__(self) -> None:
        self.requests: dict[str, SimpleNamespace] = {}
        self.kv_cache_manager = SimpleNamespace(usage=0.12345678)

    def get_request_counts(self) -> tuple[int, int]:
        return 2, 1

    def set(self, req_id: str, status: str, preemptions: int = 0) -> None:
        self.requests[req_id] = SimpleNamespace(status=status, num_preemptions=preemptions)


def output(new: dict | None = None, cached: dict | None = None, drafts: dict | None = None) -> SimpleNamespace:
    """A SchedulerOutput; ``new`` and ``cached`` map a request to (tokens computed before, tokens scheduled)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=start) for r, (start, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens={r: count for r, (_, count) in {**new, **cached}.items()},
        scheduled_spec_decode_tokens=drafts or {},
    )


def lines(*moments: tuple[FakeScheduler, SimpleNamespace]) -> list[dict]:
    file = io.StringIO()
    trace = StepTrace(file)
    for scheduler, decided in moments:
        trace.after_schedule(scheduler, decided)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_ranges_of_new_and_known_requests_with_drafts() -> None:
    scheduler = FakeScheduler()
    scheduler.set("a", "RUNNING")
    scheduler.set("b", "RUNNING")
    [line] = lines((scheduler, output({"a": (0, 16)}, {"b": (40, 3)}, {"b": [7, 8]})))
    assert line["tokens"] == {"a": [0, 16, 0], "b": [40, 3, 2]}
    assert (line["running"], line["waiting"], line["usage"], line["step"]) == (2, 1, 0.1235, 1)


def test_steps_without_tokens_or_changes_are_not_written() -> None:
    scheduler = FakeScheduler()
    scheduler.set("a", "WAITING_FOR_REMOTE_KVS")
    written = lines((scheduler, output()), (scheduler, output()), (scheduler, output(cached={"a": (3, 1)})))
    assert [line["status"] for line in written] == [{"a": "WAITING_FOR_REMOTE_KVS"}, {}]
    assert [line["step"] for line in written] == [0, 1]


def test_statuses_are_written_when_they_change_and_when_a_request_goes() -> None:
    file = io.StringIO()
    trace, scheduler = StepTrace(file), FakeScheduler()
    scheduler.set("a", "RUNNING")
    trace.after_schedule(scheduler, output({"a": (0, 1)}))
    trace.after_schedule(scheduler, output(cached={"a": (1, 1)}))
    del scheduler.requests["a"]
    trace.after_schedule(scheduler, output())
    written = [json.loads(line)["status"] for line in file.getvalue().splitlines()]
    assert written == [{"a": "RUNNING"}, {}, {"a": "GONE"}]


def test_preemption_is_seen_even_if_the_request_runs_again_in_the_same_step() -> None:
    file = io.StringIO()
    trace, scheduler = StepTrace(file), FakeScheduler()
    scheduler.set("a", "RUNNING")
    trace.after_schedule(scheduler, output({"a": (0, 4)}))
    scheduler.set("a", "RUNNING", preemptions=1)
    trace.after_schedule(scheduler, output(cached={"a": (0, 4)}))
    assert [json.loads(line)["preempted"] for line in file.getvalue().splitlines()] == [[], ["a"]]
