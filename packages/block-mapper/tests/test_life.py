"""The life of a saved request: every event in every state, legal or not."""

from collections.abc import Callable

import pytest

from block_mapper import GroupKind, HostPool, IllegalEvent, JobDone, KVGroup, SavedRequests, State

STORE, LOAD, AGAIN = 0, 1, 2


@pytest.fixture
def saved() -> SavedRequests:
    return SavedRequests(HostPool(16), [KVGroup(GroupKind.FULL, 4)], world_size=2)


def used(saved: SavedRequests) -> int:
    saved.check_integrity()
    return saved.pool.usage().used


def save(saved: SavedRequests, req_id: str = "a", job: int = STORE) -> None:
    saved.save(req_id, [[10, 11]], 8, job)


def load(saved: SavedRequests, req_id: str = "a", job: int = LOAD) -> None:
    saved.load(req_id, [[20, 21]], 8, job)


def bring_to(saved: SavedRequests, state: State) -> None:
    if state is not State.GONE:
        save(saved)
    if state in (State.RESTORABLE, State.LOADING):
        saved.report(STORE, 2)
    if state is State.LOADING:
        load(saved)
    assert saved.state("a") is state


@pytest.mark.parametrize(
    ("state", "event", "after"),
    [
        (State.GONE, save, State.STORING),
        (State.GONE, load, IllegalEvent),
        (State.STORING, save, IllegalEvent),
        (State.STORING, load, IllegalEvent),
        (State.RESTORABLE, save, IllegalEvent),
        (State.RESTORABLE, load, State.LOADING),
        (State.LOADING, save, State.STORING),
        (State.LOADING, load, IllegalEvent),
    ],
)
def test_every_event_in_every_state(
    saved: SavedRequests, state: State, event: Callable[..., None], after: State | type[IllegalEvent]
) -> None:
    bring_to(saved, state)
    if isinstance(after, State):
        event(saved, job=AGAIN)
        assert saved.state("a") is after
    else:
        before = (saved.pool.usage(), saved.open_jobs(), saved.restorable_tokens("a"))
        with pytest.raises(after, match=f"'a' is {state.value}"):
            event(saved, job=AGAIN)
        assert (saved.pool.usage(), saved.open_jobs(), saved.restorable_tokens("a")) == before
        assert saved.state("a") is state
    saved.check_integrity()


@pytest.mark.parametrize("end", ["discard", "reset"])
@pytest.mark.parametrize("reported", [0, 1])
@pytest.mark.parametrize("state", list(State))
def test_request_ended_in_any_state_returns_its_blocks_once_its_copies_are_done(
    saved: SavedRequests, state: State, reported: int, end: str
) -> None:
    bring_to(saved, state)
    for job in saved.open_jobs():
        saved.report(job, reported) if reported else None
    if end == "discard":
        assert saved.discard("a") is (state is not State.GONE)
        assert saved.discard("a") is False
    else:
        saved.reset()
    assert "a" not in saved
    assert saved.restorable_tokens("a") == 0
    assert used(saved) == (2 if saved.open_jobs() else 0)
    for job in saved.open_jobs():
        assert saved.report(job, 2 - reported) == JobDone(job)
    assert used(saved) == 0
    assert saved.pool.usage().free == 16
    assert len(saved) == 0


def test_query_repeated_has_no_effect_that_a_second_one_sees(saved: SavedRequests) -> None:
    answers = []
    for state in (State.GONE, State.STORING, State.RESTORABLE, State.LOADING):
        fresh = SavedRequests(HostPool(16), saved.groups, world_size=2)
        bring_to(fresh, state)
        before = (fresh.pool.usage(), fresh.open_jobs(), fresh.host_tables("a")[0].tolist() if "a" in fresh else None)
        asked = [fresh.restorable_tokens("a", n) for n in (None, 5, None, 100, 0, None)]
        after = (fresh.pool.usage(), fresh.open_jobs(), fresh.host_tables("a")[0].tolist() if "a" in fresh else None)
        assert before == after
        assert asked[0] == asked[2] == asked[5]
        assert fresh.state("a") is state
        answers.append(asked)
    assert answers == [[0] * 6, [None] * 6, [8, 5, 8, 8, 0, 8], [None] * 6]


def test_request_is_not_restorable_before_every_rank_has_stored(saved: SavedRequests) -> None:
    save(saved)
    assert saved.report(STORE) is None
    assert saved.restorable_tokens("a") is None
    with pytest.raises(IllegalEvent, match="'a' is storing"):
        load(saved)
    assert saved.report(STORE) == JobDone(STORE, restorable=("a",))
    assert saved.restorable_tokens("a") == 8


def test_requests_of_one_step_share_a_job(saved: SavedRequests) -> None:
    save(saved, "a")
    save(saved, "b")
    saved.discard("a")
    assert saved.report(STORE, 2) == JobDone(STORE, restorable=("b",))


def test_request_discarded_and_saved_again_in_one_job(saved: SavedRequests) -> None:
    save(saved)
    saved.discard("a")
    save(saved)
    assert used(saved) == 4, "the first copy of the job still writes its blocks"
    assert saved.report(STORE, 2) == JobDone(STORE, restorable=("a",))
    assert used(saved) == 2


def test_failed_store_drops_the_request_for_the_fallback(saved: SavedRequests) -> None:
    save(saved)
    assert saved.report(STORE, failed=True) is None
    assert saved.restorable_tokens("a") is None
    assert used(saved) == 2, "the other rank still copies"
    assert saved.report(STORE) == JobDone(STORE, failed=("a",))
    assert saved.state("a") is State.GONE
    assert used(saved) == 0


def test_failed_load_drops_the_request_for_the_fallback(saved: SavedRequests) -> None:
    bring_to(saved, State.LOADING)
    assert saved.report(LOAD) is None
    assert saved.report(LOAD, failed=True) == JobDone(LOAD, failed=("a",))
    assert saved.restorable_tokens("a") == 0
    assert used(saved) == 0


def test_preempted_again_right_after_resume(saved: SavedRequests) -> None:
    bring_to(saved, State.LOADING)
    assert saved.report(LOAD, 2) == JobDone(LOAD, restored=("a",))
    assert used(saved) == 0
    saved.save("a", [[20, 21, 22]], 9, AGAIN)
    assert saved.report(AGAIN, 2) == JobDone(AGAIN, restorable=("a",))
    assert saved.restorable_tokens("a") == 9


@pytest.mark.parametrize("first", [LOAD, AGAIN])
def test_preempted_again_while_loading_waits_for_both_copies(saved: SavedRequests, first: int) -> None:
    bring_to(saved, State.LOADING)
    pairs = saved.save("a", [[20, 21, 22]], 9, AGAIN)
    assert used(saved) == 5, "the load still reads the first two"
    assert not {1, 2} & set(pairs[:, 1].tolist())
    second = LOAD + AGAIN - first
    assert saved.report(first, 2) == JobDone(first)
    assert saved.restorable_tokens("a") is None
    assert saved.report(second, 2) == JobDone(second, restorable=("a",))
    assert saved.restorable_tokens("a") == 9
    assert used(saved) == 3


def test_preempted_again_while_loading_is_dropped_when_that_load_fails(saved: SavedRequests) -> None:
    bring_to(saved, State.LOADING)
    saved.save("a", [[20, 21, 22]], 9, AGAIN)
    assert saved.report(LOAD, 2, failed=True) == JobDone(LOAD, failed=("a",))
    assert used(saved) == 3, "the second store still writes"
    assert saved.report(AGAIN, 2) == JobDone(AGAIN)
    assert used(saved) == 0


def test_late_report_of_a_former_life_does_not_touch_the_new_one(saved: SavedRequests) -> None:
    save(saved)
    saved.discard("a")
    save(saved, job=AGAIN)
    assert saved.report(STORE, 2, failed=True) == JobDone(STORE)
    assert saved.state("a") is State.STORING
    assert saved.report(AGAIN, 2) == JobDone(AGAIN, restorable=("a",))


def test_blocks_under_copy_are_not_handed_out(saved: SavedRequests) -> None:
    save(saved)
    saved.report(STORE)
    saved.discard("a")
    other = saved.save("b", [list(range(30, 44))], 56, AGAIN)
    assert not {1, 2} & set(other[:, 1].tolist())


class TestReports:
    def test_job_that_is_not_open(self, saved: SavedRequests) -> None:
        with pytest.raises(IllegalEvent, match="job 7 is not open: never started"):
            saved.report(7)
        save(saved)
        saved.report(STORE, 2)
        with pytest.raises(IllegalEvent, match="job 0 is not open"):
            saved.report(STORE)

    @pytest.mark.parametrize("count", [-1, 0, 2])
    def test_more_reports_than_ranks_or_none(self, saved: SavedRequests, count: int) -> None:
        save(saved)
        saved.report(STORE)
        with pytest.raises(IllegalEvent, match=f"{count} more reports of job 0: 1 of 2 ranks"):
            saved.report(STORE, count)
        assert saved.state("a") is State.STORING
        assert saved.report(STORE) == JobDone(STORE, restorable=("a",))

    def test_job_with_nothing_to_copy_is_reported_too(self) -> None:
        saved = SavedRequests(HostPool(4), [KVGroup(GroupKind.CHUNKED_LOCAL, 4, window=8)], world_size=2)
        assert len(saved.save("a", [[0, 0]], 8, STORE)) == 0
        assert saved.restorable_tokens("a") is None
        assert saved.report(STORE, 2) == JobDone(STORE, restorable=("a",))

    def test_job_takes_one_direction(self, saved: SavedRequests) -> None:
        bring_to(saved, State.RESTORABLE)
        save(saved, "b", AGAIN)
        with pytest.raises(IllegalEvent, match="job 2 is a store job"):
            load(saved, "a", AGAIN)
        load(saved)
        with pytest.raises(IllegalEvent, match="job 1 is a load job"):
            save(saved, "c", LOAD)

    def test_job_under_report_takes_no_more_copies(self, saved: SavedRequests) -> None:
        save(saved)
        saved.report(STORE)
        with pytest.raises(IllegalEvent, match="job 0 has been reported by 1 ranks"):
            save(saved, "b")

    def test_negative_job_number(self, saved: SavedRequests) -> None:
        with pytest.raises(ValueError, match="job is -1"):
            save(saved, job=-1)


def test_integrity_check_sees_a_lost_reference(saved: SavedRequests) -> None:
    save(saved)
    saved.check_integrity()
    saved.pool.retain(saved.host_tables("a")[0][:1])
    with pytest.raises(AssertionError, match=r"host blocks \[1\] are held \[2\] times, counted \[3\]"):
        saved.check_integrity()


def test_integrity_check_sees_a_request_that_waits_for_nothing(saved: SavedRequests) -> None:
    save(saved)
    saved._saved["a"].waits_for.clear()
    with pytest.raises(AssertionError, match="'a' is storing, waits for set"):
        saved.check_integrity()
