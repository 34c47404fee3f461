"""Victims of every kind: what a request carries besides its tokens comes through a preemption as in plain vLLM."""

from types import SimpleNamespace

import pytest
from test_connector import TIGHT, assert_empty, counters, note_victims, recomputed_tokens
from vllm.lora.request import LoRARequest
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

OUTPUT = 40


def run(engine, prepare=lambda request, index: None, **options):
    requests = []
    for index in range(6):
        request = engine.add(f"r{index}", range(10, 40 + index), OUTPUT, **options)
        prepare(request, index)
        requests.append(request)
    engine.run()
    assert all(len(tokens) == OUTPUT for tokens in engine.outputs.values())
    assert_empty(engine)
    return requests


def prompts(requests):
    return sum(request.num_prompt_tokens for request in requests)


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 3},
        {"temperature": 0.9, "seed": 11, "top_p": 0.9},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 20},
        {"stop_token_ids": [2], "bad_words": []},
    ],
)
def test_sampling_parameters(make_engine, options):
    engine = make_engine(TIGHT)
    requests = run(engine, **options)
    assert counters(engine)["preempted_restored"] >= 2
    assert recomputed_tokens(engine) == prompts(requests)
    for request in requests:
        for name, value in options.items():
            assert getattr(request.sampling_params, name) == value


def test_prompt_logprobs_are_left_to_vllm_and_that_is_said_once(make_engine, caplog_vllm):
    engine = make_engine(TIGHT)
    run(engine, prompt_logprobs=1)
    figures = counters(engine)
    assert figures["fallback"] >= 2
    assert "preempted_offloaded" not in figures
    assert len([r for r in caplog_vllm.records if "log-probabilities of its prompt" in r.getMessage()]) == 1


class NotingGrammar(StructuredOutputGrammar):
    """In place of a compiled grammar: it allows everything and notes what it is given."""

    def __init__(self):
        self.accepted = []

    def accept_tokens(self, request_id, tokens):
        self.accepted += tokens
        return True

    def validate_tokens(self, tokens):
        return tokens

    def is_terminated(self):
        return False

    def rollback(self, num_tokens):
        raise AssertionError("nothing is speculated here")

    def fill_bitmask(self, bitmask, batch_index):
        raise AssertionError("no bitmask is asked for here")

    def reset(self):
        self.accepted.clear()


def test_a_grammar_takes_in_every_token_once(make_engine):
    engine = make_engine(TIGHT)
    grammars = [NotingGrammar() for _ in range(6)]

    def prepare(request, index):
        request.structured_output_request = SimpleNamespace(
            grammar=grammars[index],
            structured_output_key=("json", "{}"),
            reasoning_ended=True,
            reasoning_end_token_index=None,
        )

    engine.scheduler.structured_output_manager.should_advance = lambda request, **_: True
    engine.scheduler.structured_output_manager.grammar_bitmask = lambda *args, **kwargs: None
    run(engine, prepare)
    assert counters(engine)["preempted_restored"] >= 2
    assert [grammar.accepted for grammar in grammars] == list(engine.outputs.values())


@pytest.mark.parametrize("max_loras", [1, 2])
def test_adapters(make_engine, max_loras):
    engine = make_engine(10 * max_loras, enable_lora=True, max_loras=max_loras, max_cpu_loras=2)
    adapters = [LoRARequest(f"adapter{n}", n, f"/adapter{n}") for n in (1, 2)]

    def prepare(request, index):
        request.lora_request = adapters[index % 2]

    requests = run(engine, prepare)
    assert counters(engine)["preempted_restored"] >= 1
    assert recomputed_tokens(engine) == prompts(requests)
    assert [request.lora_request for request in requests] == adapters * 3


def test_an_unfinished_prompt_goes_on_where_it_stopped(make_engine):
    """Preempted between two chunks of its prompt."""
    engine = make_engine(TIGHT, max_num_batched_tokens=16)
    requests = [engine.add(f"r{index}", range(10, 30), OUTPUT, priority=0) for index in range(4)]
    requests.append(engine.add("long", range(10, 170), OUTPUT))
    victims = note_victims(engine)
    engine.run()
    assert "long" in {request.request_id for request, computed in victims if computed < request.num_prompt_tokens}
    assert recomputed_tokens(engine) == prompts(requests)
    assert_empty(engine)
