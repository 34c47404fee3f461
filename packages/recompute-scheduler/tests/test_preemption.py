"""The mixin on vLLM's real schedulers: when the hook is called, with what, and that nothing else changes."""

import pytest
from recording_connector import RecordingConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from recompute_scheduler._vllm import is_in_flight
from recompute_scheduler.testing import BLOCK_SIZE, VICTIMS_MAY_BE_IN_FLIGHT

PLAIN = {"sync": Scheduler, "async": AsyncScheduler}
TIGHT = 20


def load(engine, requests=6, prompt=30, max_tokens=40, **options):
    for index in range(requests):
        engine.add(f"r{index}", range(10, 10 + prompt + index), max_tokens, **options)


def run_with_tables(engine):
    """Step to the end; return the block table and computed tokens that each victim had when it was preempted."""
    seen = []
    preempt = engine.scheduler._preempt_request

    def spy(request, *args, **kwargs):
        blocks = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        seen.append((request.request_id, [list(ids) for ids in blocks], request.num_computed_tokens))
        return preempt(request, *args, **kwargs)

    engine.scheduler._preempt_request = spy
    engine.run()
    return seen


def test_hook_sees_every_victim_running_with_its_whole_block_table(make_engine):
    engine = make_engine(TIGHT)
    load(engine)
    victims = run_with_tables(engine)
    assert len(victims) >= 2
    assert [call[:3] for call in RecordingConnector.calls] == victims
    for _, (blocks,), num_computed, status in RecordingConnector.calls:
        assert status == "RUNNING"
        assert len(blocks) == -(-num_computed // BLOCK_SIZE)
        assert 0 not in blocks


def test_a_victim_has_nothing_in_flight_where_vllm_drains_it_first(make_engine, mode):
    engine = make_engine(TIGHT)
    load(engine)
    in_flight = []
    hook = engine.scheduler._hooks[0]
    original = hook.update_state_before_preempt

    def spy(request, block_ids, num_computed_tokens):
        in_flight.append(is_in_flight(request))
        return original(request, block_ids, num_computed_tokens)

    hook.update_state_before_preempt = spy
    engine.run()
    assert in_flight
    assert any(in_flight) == (VICTIMS_MAY_BE_IN_FLIGHT and mode == "async")


def test_off_means_off_the_schedule_is_that_of_plain_vllm(make_engine, mode):
    traces = []
    for cls in (None, PLAIN[mode]):
        engine = make_engine(TIGHT, cls)
        load(engine)
        engine.run()
        traces.append((engine.trace, engine.outputs))
    assert RecordingConnector.calls
    assert traces[0] == traces[1]


def test_outputs_are_those_of_a_run_without_pressure(make_engine):
    outputs = []
    for num_blocks in (TIGHT, 1000):
        engine = make_engine(num_blocks)
        load(engine)
        engine.run()
        outputs.append(engine.outputs)
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 40 for tokens in outputs[0].values())


@pytest.mark.parametrize("running", [True, False])
def test_reset_of_running_requests_drops_what_was_kept_before(make_engine, running):
    """Their KV is as invalid as that of the requests that run, whether or not the connector is to be reset."""
    engine = make_engine(TIGHT)
    resets = []
    engine.scheduler._hooks[0].reset_cache = lambda: resets.append("reset")
    engine.scheduler.reset_prefix_cache(reset_running_requests=running)
    assert resets == ["reset"] * running


def test_reset_of_the_prefix_cache_keeps_nothing(make_engine):
    engine = make_engine(200)
    load(engine)
    for _ in range(6):
        engine.step()
    assert len(engine.scheduler.running) > 1
    while engine._in_flight:
        engine._take_in()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not engine.scheduler.running
    assert RecordingConnector.calls == []
    engine.run()


def test_pausing_preempts_nobody(make_engine):
    from vllm.v1.core.sched.interface import PauseState

    engine = make_engine(200)
    load(engine)
    for _ in range(3):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(3):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert RecordingConnector.calls == []


def test_the_hook_is_off_again_when_schedule_raises(make_engine):
    engine = make_engine(200)
    load(engine, requests=2)
    engine.step()
    engine.scheduler.kv_cache_manager.allocate_slots = None
    with pytest.raises(TypeError):
        engine.scheduler.schedule()
    assert engine.scheduler._inside_schedule is False


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_vllm_chooses_the_victims(make_engine, mode, policy):
    victims = []
    for cls in (None, PLAIN[mode]):
        engine = make_engine(TIGHT, cls, scheduling_policy=policy)
        for index in range(6):
            engine.add(f"r{index}", range(10, 40 + index), 40, priority=(index * 5) % 7, arrival_time=float(index))
        victims.append([name for name, _, _ in run_with_tables(engine)])
    assert victims[0] == victims[1]
    assert victims[0]
    assert [call[0] for call in RecordingConnector.calls] == victims[0]


def test_several_victims_in_one_step_are_each_offered_once(make_engine):
    """One request that needs many blocks at once, behind small ones that hold few each."""
    engine = make_engine(26, scheduling_policy="priority", max_num_batched_tokens=256, long_prefill_token_threshold=0)
    for index in range(12):
        engine.add(f"small{index}", range(10, 34), 100, priority=9, arrival_time=float(index))
    for _ in range(4):
        engine.step()
    engine.add("large", range(10, 10 + 150), 20, priority=0, arrival_time=99.0)
    per_step = []
    for _ in range(300):
        before = len(RecordingConnector.calls)
        engine.step()
        per_step.append([call[0] for call in RecordingConnector.calls[before:]])
    assert max(map(len, per_step)) >= 2
    assert all(len(set(names)) == len(names) for names in per_step)


def test_the_request_being_scheduled_can_be_the_victim(make_engine):
    engine = make_engine(TIGHT)
    load(engine, requests=1, prompt=200, max_tokens=60)
    load_two = engine.add("last", range(10, 60), 60)
    engine.run()
    assert "last" in {call[0] for call in RecordingConnector.calls}
    assert load_two.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_without_a_hook_there_is_one_warning_and_plain_behaviour(make_engine, mode, caplog_vllm):
    silent = {
        "kv_connector": "SilentConnector",
        "kv_connector_module_path": "recording_connector",
        "kv_role": "kv_consumer",
    }
    traces = []
    for cls in (None, PLAIN[mode]):
        engine = make_engine(TIGHT, cls, kv_transfer_config=silent)
        load(engine)
        engine.run()
        traces.append(engine.trace)
    assert traces[0] == traces[1]
    warnings = [record for record in caplog_vllm.records if "no KV connector offers" in record.getMessage()]
    assert len(warnings) == 1


def test_hook_inside_a_multi_connector_is_found(make_engine):
    child = {"kv_connector_module_path": "recording_connector", "kv_role": "kv_consumer"}
    children = [{"kv_connector": name, **child} for name in ("SilentConnector", "RecordingConnector")]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": children},
    }
    engine = make_engine(TIGHT, kv_transfer_config=multi)
    load(engine)
    engine.run()
    assert RecordingConnector.calls


@pytest.mark.parametrize("answer", [True, False])
def test_the_log_names_only_requests_that_were_kept(make_engine, caplog_vllm, answer):
    RecordingConnector.answer = answer
    engine = make_engine(TIGHT)
    load(engine)
    engine.run()
    lines = [r.getMessage() for r in caplog_vllm.records if "Recompute preemption offload enabled" in r.getMessage()]
    expected = [f"Recompute preemption offload enabled for request {call[0]}" for call in RecordingConnector.calls]
    assert RecordingConnector.calls
    assert [line.split(":")[0] for line in lines] == (expected if answer else [])
