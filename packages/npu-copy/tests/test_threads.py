from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from npu_copy._threads import Team

many_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


def run_on_both(team: Team) -> dict[int, set[int]]:
    """Run once on the caller's thread and on the helper's; their CPUs by native thread id."""
    ran, cpus = threading.Barrier(2), {}

    def work(_: int) -> None:
        ran.wait(10)
        cpus[threading.get_native_id()] = os.sched_getaffinity(0)

    team.run(2, work)
    return cpus


def test_a_failure_on_a_helper_thread_is_not_lost(team: Team) -> None:
    ran = threading.Barrier(2)

    def work(i: int) -> None:
        ran.wait(10)
        if threading.current_thread() is not threading.main_thread():
            raise OSError("on a helper")

    with pytest.raises(OSError, match="on a helper"):
        team.run(2, work)


@many_cpus
def test_helpers_keep_off_the_callers_cpu_wherever_it_goes(team: Team) -> None:
    before = os.sched_getaffinity(0)
    run_on_both(team)  # the helper starts
    try:
        for cpu in sorted(before)[:2]:
            os.sched_setaffinity(0, {cpu})
            cpus = run_on_both(team)
            assert cpus.pop(threading.get_native_id()) == {cpu}
            assert list(cpus.values()) == [before - {cpu}]
    finally:
        os.sched_setaffinity(0, before)


def test_a_process_with_one_cpu_copies_with_both_threads_there() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        team = Team(2)
        run_on_both(team)
        assert list(run_on_both(team).values()) == [one, one]
        team.close()
    finally:
        os.sched_setaffinity(0, before)


@many_cpus
def test_where_affinity_may_not_be_set_the_work_is_done_all_the_same(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def refuse(thread: int, cpus: set[int]) -> None:
        refused.append(thread)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    run_on_both(team)
    assert len(run_on_both(team)) == 2
    assert refused


def test_without_wait_the_caller_goes_on_while_a_helper_is_at_work(team: Team) -> None:
    both, leave, left = threading.Barrier(2), threading.Event(), threading.Event()

    def work(_: int) -> None:
        both.wait(10)
        if threading.current_thread() is not threading.main_thread():
            leave.wait(10)
            left.set()

    team.run(2, work, wait=False)
    assert not left.is_set()
    leave.set()
    team.close()
    assert left.is_set()
