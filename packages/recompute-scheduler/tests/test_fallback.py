"""What becomes of a victim of which nothing was kept."""

import pytest
from recording_connector import RecordingConnector
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from recompute_scheduler.fallback import FALLBACK, MAX_LOCAL_TOKENS, Fallback, why_not_resend

TIGHT = 20


def load(engine, requests=6, **options):
    for index in range(requests):
        engine.add(f"r{index}", range(10, 40 + index), 40, **options)


def resend(**more):
    return {FALLBACK: "resend", **more}


def test_the_default_is_local():
    assert Fallback.parse({}) == Fallback(resend=False, max_local_tokens=0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({FALLBACK: "remote"}, 'write "local" or "resend"'),
        ({FALLBACK: True}, 'write "local" or "resend"'),
        ({FALLBACK: "resend", MAX_LOCAL_TOKENS: -1}, "number of tokens"),
        ({FALLBACK: "resend", MAX_LOCAL_TOKENS: "10"}, "number of tokens"),
        ({FALLBACK: "resend", MAX_LOCAL_TOKENS: True}, "number of tokens"),
        ({MAX_LOCAL_TOKENS: 10}, 'add "recompute_fallback": "resend"'),
        ({FALLBACK: "resend", "scheduler_config": {FALLBACK: "local"}}, "contradicts itself"),
    ],
)
def test_bad_settings_are_errors_that_say_what_to_write(given, told):
    with pytest.raises(ValueError, match=told):
        Fallback.parse(given)


def test_settings_are_read_from_the_section_too():
    assert Fallback.parse({"scheduler_config": resend(**{MAX_LOCAL_TOKENS: 7})}) == Fallback(True, 7)


def test_a_resent_request_ends_with_its_reason_and_leaves_nothing_behind(make_engine):
    engine = make_engine(TIGHT, additional_config=resend())
    load(engine)
    engine.run()
    victims = [call[0] for call in RecordingConnector.calls]
    assert victims
    assert len(set(victims)) == len(victims)
    for name in victims:
        end = engine.ends[name]
        assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, "recomputed")
        assert len(engine.outputs[name]) < 40
    for name in engine.outputs.keys() - set(victims):
        assert engine.ends[name].finish_reason is FinishReason.LENGTH
        assert len(engine.outputs[name]) == 40
    scheduler = engine.scheduler
    assert scheduler.requests == {}
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == TIGHT - 1
    assert scheduler.recompute_counters == {"preempted": len(victims), "resent": len(victims)}


def test_output_before_the_end_is_a_prefix_of_the_whole(make_engine):
    engine = make_engine(TIGHT, additional_config=resend())
    load(engine)
    engine.run()
    ample = make_engine(1000)
    load(ample)
    ample.run()
    for name, tokens in engine.outputs.items():
        assert tokens == ample.outputs[name][: len(tokens)]


def test_small_requests_are_recomputed_here_and_large_ones_resent(make_engine):
    engine = make_engine(TIGHT, additional_config=resend(**{MAX_LOCAL_TOKENS: 50}))
    load(engine)
    sizes = {}
    engine.scheduler._hooks[0].update_state_before_preempt = lambda request, *_: (
        sizes.setdefault((request.request_id, request.num_preemptions), request.num_tokens) and False
    )
    engine.run()
    resent = {name for name, end in engine.ends.items() if end.stop_reason == "recomputed"}
    large = {name for (name, _), size in sizes.items() if size > 50}
    assert resent == large
    assert len(sizes) > len(large) > 0


def test_kept_requests_are_not_resent(make_engine):
    RecordingConnector.answer = True
    engine = make_engine(TIGHT, additional_config=resend())
    load(engine)
    engine.run()
    assert RecordingConnector.calls
    assert all(end.finish_reason is FinishReason.LENGTH for end in engine.ends.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, None),
        ({"min_tokens": 3, "logprobs": 2, "repetition_penalty": 1.1}, None),
        ({"temperature": 0.7}, None),
        ({"temperature": 0.7, "seed": 1}, "random numbers"),
        ({"seed": 1}, None),
        ({"presence_penalty": 0.1}, "sampling looks"),
        ({"frequency_penalty": 0.1}, "sampling looks"),
        ({"stop": ["end"], "detokenize": True}, "may lie across"),
        ({"extra_args": {FALLBACK: "local"}}, "says so itself"),
        ({"extra_args": {FALLBACK: "resend"}}, None),
        ({"extra_args": {"kv_transfer_params": {}}}, None),
        ({"structured_outputs": StructuredOutputsParams(json_object=True)}, "grammar"),
    ],
)
def test_requests_that_would_change_are_recomputed_here(make_engine, options, told):
    request = make_engine(100).add("r", range(10, 20), 5, **options)
    reason = why_not_resend(request)
    assert (reason is None) if told is None else (told in reason)


def test_a_request_that_would_change_is_not_ended(make_engine):
    engine = make_engine(TIGHT, additional_config=resend())
    load(engine, frequency_penalty=0.5)
    engine.run()
    assert RecordingConnector.calls
    assert all(end.finish_reason is FinishReason.LENGTH for end in engine.ends.values())
    assert engine.scheduler.recompute_counters["recomputed"] == len(RecordingConnector.calls)


def test_a_length_that_the_server_caps_is_not_resent(make_engine):
    """Each part of a joined answer would get the server's cap anew."""
    engine = make_engine(TIGHT, additional_config=resend(), override_generation_config={"max_new_tokens": 40})
    load(engine)
    engine.run()
    assert RecordingConnector.calls
    assert engine.scheduler.recompute_counters["resent"] == 0
    below = make_engine(TIGHT, additional_config=resend(), override_generation_config={"max_new_tokens": 41})
    load(below)
    below.run()
    assert below.scheduler.recompute_counters["resent"] > 0
