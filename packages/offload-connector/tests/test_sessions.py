"""Streaming input: one request that takes further prompts and keeps its KV between them."""

import pytest
from test_connector import TIGHT, assert_empty, counters, manager
from vllm.v1.request import RequestStatus

from offload_connector.last_steps import LastSteps
from recompute_scheduler.testing import BLOCK_SIZE, VICTIMS_MAY_BE_IN_FLIGHT

TURNS = 3
OUTPUT = 12


def load(engine, sessions=6):
    """Queue every session with all its inputs, and their end."""
    for index in range(sessions):
        for turn in range(TURNS):
            prompt = range(10 + turn, 30 + turn + index)
            engine.add(f"s{index}", prompt, OUTPUT, resumable=True)
        engine.add(f"s{index}", [3], OUTPUT, resumable=False)


def scheduled(engine):
    return sum(sum(step.values()) for step in engine.trace)


def test_a_session_goes_on_as_without_pressure(make_engine):
    tight, ample = make_engine(TIGHT), make_engine(1000)
    for engine in (tight, ample):
        load(engine)
        engine.run()
        assert_empty(engine)
    assert counters(tight)["preempted_restored"] >= 2
    assert "preempted_restored" not in counters(ample)
    assert tight.outputs == ample.outputs
    assert all(len(tokens) == TURNS * OUTPUT for tokens in tight.outputs.values())
    assert scheduled(tight) == scheduled(ample)


def test_where_the_state_depends_on_the_last_step_a_waiting_session_is_recomputed(make_engine, mode):
    """Between its turns the last step's drafts say nothing about where its recurrent state lies."""
    engine, ample = make_engine(TIGHT), make_engine(1000)
    manager(engine)._last_steps = LastSteps(BLOCK_SIZE)
    for each in (engine, ample):
        load(each)
        each.run()
    assert counters(engine)["fallback"] >= 1
    # Nor does anything tell where the state of a victim lies whose last step is in flight.
    unknown = VICTIMS_MAY_BE_IN_FLIGHT and mode == "async"
    assert (counters(engine).get("preempted_restored", 0) == 0) == unknown
    assert engine.outputs == ample.outputs
    assert_empty(engine)


def test_input_that_arrives_while_a_session_is_saved_is_taken_in_at_its_turn(make_engine):
    engine = make_engine(TIGHT)
    for index in range(6):
        engine.add(f"s{index}", range(10, 30 + index), 40, resumable=True)
    saved = None
    for _ in range(300):
        engine.step()
        preempted = [r for r in engine.scheduler.requests.values() if r.status is RequestStatus.PREEMPTED]
        if preempted:
            (saved, *_) = preempted
            break
    assert saved is not None
    before = list(saved.all_token_ids)
    engine.add(saved.request_id, range(100, 120), 40, resumable=True)
    assert list(saved.all_token_ids) == before
    for index in range(6):
        engine.add(f"s{index}", [3], OUTPUT, resumable=False)
    engine.run()
    assert counters(engine)["preempted_restored"] >= 1
    assert len(engine.outputs[saved.request_id]) == 40 + 40
    assert_empty(engine)


@pytest.mark.parametrize("when", ["saved", "waiting for input"])
def test_a_session_that_is_aborted_leaves_nothing(make_engine, when):
    engine = make_engine(TIGHT)
    status = {"saved": RequestStatus.PREEMPTED, "waiting for input": RequestStatus.WAITING_FOR_STREAMING_REQ}[when]
    for index in range(6):
        engine.add(f"s{index}", range(10, 30 + index), 40, resumable=True)
    aborted = []
    for _ in range(600):
        engine.step()
        for request in list(engine.scheduler.requests.values()):
            if request.status is status:
                engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
                aborted.append(request.request_id)
        if not engine.scheduler.has_unfinished_requests():
            break
    assert aborted
    for index in range(6):
        if f"s{index}" in engine.scheduler.requests:
            engine.add(f"s{index}", [3], OUTPUT, resumable=False)
    engine.run()
    assert counters(engine)["preempted_offloaded"] >= 1
    assert_empty(engine)
