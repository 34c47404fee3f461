"""The engine pauses and sleeps while requests are saved: vLLM pauses the scheduler, waits until no work is left, and
clears every cache if the memory is to be given up."""

import time

import pytest
from test_connector import TIGHT, all_restored, assert_empty, counters, load, manager
from vllm.v1.core.sched.interface import PauseState

from block_mapper import State

STATES = (State.STORING, State.RESTORABLE, State.LOADING)


def run_until(engine, state):
    """Step until some request is in this state."""
    for _ in range(500):
        engine.step()
        saved = manager(engine)._saved
        if saved is not None and any(saved.state(name) is state for name in engine.scheduler.requests):
            return
    raise AssertionError(f"no request is ever {state}")


def report_late(engine):
    """A copy is still under way at the end of its step, as on an accelerator."""
    copies = engine.worker.connectors[0].worker._engine
    poll, late = copies.poll, []

    def poll_late():
        due = late.copy()
        late[:] = poll()
        return due

    copies.poll = poll_late
    copies.wait = lambda job, timeout: None


def quiesce(engine):
    """Pause as the engine core does: it goes on stepping while there is work, then the device is idle."""
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    # A load runs on a thread of its own and takes the time it takes.
    deadline = time.monotonic() + 60
    while engine.scheduler.has_requests():
        assert time.monotonic() < deadline
        engine.step()
    while engine._in_flight:
        engine._take_in()
    assert not manager(engine).has_pending_jobs()


@pytest.fixture(params=STATES, ids=lambda state: state.value)
def paused(request, make_engine, monkeypatch):
    """An engine that came to rest when a request was in one of the states of a saved one."""
    monkeypatch.setattr("offload_connector.within_step.LOAD_WITHIN_STEP_BYTES", 0)
    engine = make_engine(TIGHT)
    report_late(engine)
    load(engine, requests=8)
    run_until(engine, request.param)
    quiesce(engine)
    return engine


def wake(engine):
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())
    assert_empty(engine)


def test_saved_requests_outlive_a_pause(paused, mode):
    wake(paused)
    figures = counters(paused)
    assert all_restored(figures, mode)
    assert "fallback" not in figures


def test_sleep_clears_the_host_as_well(paused):
    """Another model may wake up: nothing that was computed before may come back, and nothing is left of it."""
    assert paused.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert_empty(paused)
    pool = paused.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == TIGHT - 1
    wake(paused)
