"""The connector between vLLM's real scheduler and real bytes."""

from collections import Counter

import pytest
from vllm.v1.request import RequestStatus

from offload_connector.metrics import OffloadStats
from recompute_scheduler.testing import BLOCK_SIZE, VICTIMS_MAY_BE_IN_FLIGHT

TIGHT = 20


def load(engine, requests=6, prompt=30, max_tokens=40):
    for index in range(requests):
        engine.add(f"r{index}", range(10, 10 + prompt + index), max_tokens)


def manager(engine):
    return engine.scheduler.connector.manager


def counters(engine):
    """What vLLM would export by now: counters and gauges by name, summed over their labels."""
    stats = OffloadStats()
    for data in engine.connector_stats:
        stats.aggregate(OffloadStats(data=data))
    return {name: sum(values.values()) for name, values in stats.data.items() if isinstance(values, dict)}


def recomputed_tokens(engine):
    """Tokens scheduled beyond those that a run without preemption would schedule."""
    scheduled = sum(sum(step.values()) for step in engine.trace)
    return scheduled - sum(len(o) - 1 for o in engine.outputs.values())


def note_victims(engine):
    """Return a list to be filled with (request, tokens computed) of each victim that the connector is asked to keep."""
    victims = []
    hook = engine.scheduler._hooks[0]
    keep = hook.update_state_before_preempt

    def noting(request, block_ids, num_computed_tokens):
        victims.append((request, num_computed_tokens))
        return keep(request, block_ids, num_computed_tokens)

    hook.update_state_before_preempt = noting
    return victims


def assert_empty(engine):
    """No saved request, no job, and every host block free."""
    m = manager(engine)
    m.check_integrity()
    assert not m.has_pending_jobs()
    assert len(m._saved) == 0
    usage = m._pool.usage()
    assert usage.free == usage.total


def all_restored(figures, mode):
    """Whether every saved request came back; some end by the token that was in flight when they were preempted."""
    ended = figures["preempted_offloaded"] - figures["preempted_restored"]
    return ended == 0 or (ended > 0 and VICTIMS_MAY_BE_IN_FLIGHT and mode == "async")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_preempted_requests_go_on_at_their_exact_token(make_engine, ranks, mode):
    engine = make_engine(TIGHT, ranks=ranks)
    load(engine)
    prompts = sum(request.num_prompt_tokens for request in engine.scheduler.requests.values())
    engine.run()
    figures = counters(engine)
    assert figures["preempted_offloaded"] >= 3
    assert all_restored(figures, mode)
    assert "fallback" not in figures
    assert recomputed_tokens(engine) == prompts
    assert engine.worker.reads > 0
    assert_empty(engine)


def test_outputs_are_those_of_a_run_without_pressure(make_engine):
    outputs = []
    for num_blocks in (TIGHT, 1000):
        engine = make_engine(num_blocks)
        load(engine)
        engine.run()
        outputs.append(engine.outputs)
    assert outputs[0] == outputs[1]


def test_a_host_too_small_for_a_victim_leaves_vllms_own_path(make_engine):
    engine = make_engine(TIGHT, host_blocks=2)
    load(engine)
    engine.run()
    figures = counters(engine)
    assert figures["fallback"] >= 1
    assert "preempted_restored" not in figures
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())
    assert_empty(engine)


def test_a_host_with_room_for_some_victims_serves_those(make_engine):
    engine = make_engine(12, host_blocks=5)
    load(engine, requests=8)
    engine.run()
    figures = counters(engine)
    assert figures["fallback"] >= 1
    assert figures["preempted_restored"] >= 1
    assert figures["host_blocks_high_water"] <= 5
    assert_empty(engine)


@pytest.mark.parametrize("prompt", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
@pytest.mark.parametrize("max_tokens", [BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_lengths_around_block_boundaries(make_engine, prompt, max_tokens):
    engine = make_engine(10)
    for index in range(6):
        engine.add(f"r{index}", range(10, 10 + prompt), max_tokens)
    engine.run()
    assert all(len(tokens) == max_tokens for tokens in engine.outputs.values())
    assert recomputed_tokens(engine) == 6 * prompt
    assert_empty(engine)


def test_the_query_may_be_repeated_and_changes_nothing(make_engine):
    engine = make_engine(TIGHT)
    load(engine)
    asked = 0
    for _ in range(300):
        engine.step()
        for request in list(engine.scheduler.requests.values()):
            if request.status is RequestStatus.PREEMPTED:
                answers = {engine.scheduler.connector.get_num_new_matched_tokens(request, local) for local in (0, 0, 0)}
                assert len(answers) == 1
                asked += 1
        manager(engine).check_integrity()
    engine.run()
    assert asked > 0
    assert "fallback" not in counters(engine)
    assert_empty(engine)


@pytest.mark.parametrize("wait", [0, 1, 2, 3])
def test_an_aborted_saved_request_gives_its_host_blocks_back(make_engine, wait):
    """Abort every preempted request, `wait` steps after its preemption: storing, restorable or loading."""
    engine = make_engine(TIGHT)
    load(engine, requests=10)
    since = {}
    aborted = 0
    for _ in range(400):
        engine.step()
        for request in list(engine.scheduler.requests.values()):
            if manager(engine).holds(request.request_id):
                since.setdefault(request.request_id, 0)
        for request_id in list(since):
            if since[request_id] == wait and request_id in engine.scheduler.requests:
                engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                aborted += 1
            since[request_id] += 1
        manager(engine).check_integrity()
    engine.run()
    assert aborted > 0
    assert_empty(engine)


def test_the_gauges_follow_when_everybody_leaves(make_engine):
    """Nothing is counted when a saved request is aborted, and no later event brings the gauges up to date."""
    engine = make_engine(TIGHT)
    load(engine)
    while counters(engine).get("saved_requests", 0) == 0:
        engine.step()
    engine.scheduler.finish_requests(list(engine.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    for _ in range(5):
        engine.step()
    figures = counters(engine)
    assert figures["saved_requests"] == figures["host_blocks_used"] == 0
    assert figures["host_blocks_free"] == figures["host_blocks_total"]
    reported = len(engine.connector_stats)
    engine.step()
    assert len(engine.connector_stats) == reported
    assert_empty(engine)


def test_reset_of_running_requests_restores_nothing_stale(make_engine):
    engine = make_engine(200)
    load(engine)
    for _ in range(8):
        engine.step()
    while engine._in_flight:
        engine._take_in()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    assert "preempted_offloaded" not in counters(engine)
    assert_empty(engine)


def test_reset_drops_what_is_on_the_host(make_engine):
    engine = make_engine(TIGHT)
    load(engine)
    while not (manager(engine)._saved and len(manager(engine)._preemptions)):
        engine.step()
    while engine._in_flight:
        engine._take_in()
    assert engine.scheduler.connector.reset_cache() is True
    assert len(manager(engine)._preemptions) == 0
    engine.run()
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())
    assert_empty(engine)


def test_nothing_is_handed_out_in_a_step_without_preemption(make_engine):
    engine = make_engine(1000)
    load(engine)
    scheduled = engine.step()
    meta = scheduled.kv_connector_metadata
    assert (meta.store, meta.load_now, meta.load_behind) == (None, None, None)
    engine.run()
    gauges = {"host_blocks_total": 1000, "host_blocks_free": 1000}
    assert {name: value for name, value in counters(engine).items() if value} == gauges


def test_logs_of_one_preemption(make_engine, mode, caplog_vllm):
    engine = make_engine(TIGHT)
    load(engine)
    engine.run()
    load(engine)
    lines = [record.getMessage() for record in caplog_vllm.records]
    names = {
        start: Counter(line.removeprefix(start).split(":")[0] for line in lines if line.startswith(start))
        for start in (
            "Recompute preemption offload enabled for request ",
            "Created recompute offload state for request ",
            "Prepared recompute offload H2D load for request ",
        )
    }
    enabled, created, prepared = names.values()
    assert enabled
    assert enabled == created
    assert prepared <= created
    assert all_restored({"preempted_offloaded": created.total(), "preempted_restored": prepared.total()}, mode)


def test_a_scheduler_that_never_asks_to_keep_anything_is_told_of_once(make_engine, mode, monkeypatch, caplog_vllm):
    monkeypatch.setattr("recompute_scheduler.preemption.find_hooks", lambda connector: [])
    engine = make_engine(TIGHT)
    load(engine)
    engine.run()
    told = [record for record in caplog_vllm.records if "never asked to keep" in record.getMessage()]
    assert len(told) == 1
    assert "recompute_scheduler_enable" in told[0].getMessage()
