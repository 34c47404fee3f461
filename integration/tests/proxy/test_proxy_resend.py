"""A request that Decode gave up goes on: the client's answer is the one it would have had."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, REQUEST, TEXT, a_pair, answer, answers, both_routes, joined, streamed_or_not
from fake_vllm import FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st


def cut_answers(model: FakeModel, path: str, body: dict[str, Any], *cuts: list[int]) -> list[Any]:
    """Decode's own answer to a request, then the proxy's when Decode gives it up after so many tokens each time."""

    async def scenario() -> list[Any]:
        async with a_pair(model) as p:
            decode = p.decode[0]
            got = [await answer(p, path, body, decode.url)]
            for counts in cuts:
                decode.received.clear()
                decode.tell(counts)
                got.append(await answer(p, path, body))
                assert len(decode.received) == len(counts) + 1
        return got

    return asyncio.run(scenario())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "token ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 0},
    "logprobs as ids": {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "echo": {"echo": True, "return_token_ids": True},
    "limits": {"max_tokens": 30, "min_tokens": 5},
}


def options_for(path: str, name: str, stream: bool) -> dict[str, Any]:
    body = {**OPTIONS[name], "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    if path == CHAT and "logprobs" in body:
        body["logprobs"] = True
    return body


@both_routes
@streamed_or_not
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("per_event", [1, 3])
def test_the_answer_is_that_of_the_uncut_request(path: str, stream: bool, name: str, per_event: int) -> None:
    body = options_for(path, name, stream)
    cuts = [], [1], [4, 0, 3], [7, 1, 1, 1, 5]
    expected, *got = cut_answers(FakeModel(TEXT, per_event=per_event, late_end=per_event == 1), path, body, *cuts)
    for one, counts in zip(got, cuts, strict=True):
        assert joined(one) == joined(expected), counts
        if per_event == 1:
            assert one == expected, counts


@both_routes
@streamed_or_not
def test_wherever_it_is_cut_no_character_is_lost_or_repeated(path: str, stream: bool) -> None:
    body = options_for(path, "logprobs", stream) | {"return_token_ids": True}
    model = FakeModel(TEXT)
    expected, *got = cut_answers(model, path, body, [], *([n] for n in range(1, len(model.ids))))
    for cut, one in enumerate(got):
        assert joined(one) == joined(expected), cut


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(1, 260), min_size=1, max_size=25),
    cuts=st.lists(st.integers(1, 6), max_size=5),
    stream=st.booleans(),
    path=st.sampled_from([COMPLETIONS, CHAT]),
)
def test_bytes_that_are_no_text_are_joined_too(ids: list[int], cuts: list[int], stream: bool, path: str) -> None:
    body = {"stream": stream, "return_token_ids": True, "logprobs": True if path == CHAT else 0}
    used = [c for c, total in zip(cuts, itertools.accumulate(cuts), strict=True) if total < len(ids)]
    expected, got = cut_answers(FakeModel(TEXT, ids=ids), path, body, used)
    assert joined(got) == joined(expected)


def test_a_client_s_prompt_that_ends_in_half_a_character() -> None:
    euro = FakeModel("€").ids
    model = FakeModel(TEXT)
    model.prompt_ids, model.ids = [*model.prompt_ids, *euro[:1]], [*euro[1:], *model.ids]
    for stream in (False, True):
        body = {"stream": stream, "return_token_ids": True}
        expected, *got = cut_answers(model, COMPLETIONS, body, *([cut] for cut in range(1, 8)))
        for one in got:
            assert joined(one) == joined(expected)


@both_routes
def test_what_prefill_and_decode_are_sent_the_second_time(path: str) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "stop_token_ids": [9], "cache_salt": "s", "priority": 3}
    sampling |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    once = {"truncate_prompt_tokens": 100, "prompt_logprobs": 1}
    limits = {"max_tokens": 40, "min_tokens": 5} | ({"max_completion_tokens": 30} if path == CHAT else {})
    model = FakeModel(TEXT, cuts=[4, 3])
    _, p = answers(model, path, {**sampling, **once, **limits})
    so_far = [*model.prompt_ids, *model.ids[:4]]
    _, to_prefill, last_to_prefill = p.prefill[0].received
    assert to_prefill.path == COMPLETIONS
    transfer = to_prefill.body.pop("kv_transfer_params")
    assert to_prefill.body == {
        "model": "tiny",
        "cache_salt": "s",
        "priority": 3,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "prompt": so_far,
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
    }
    assert last_to_prefill.body["prompt"] == [*model.prompt_ids, *model.ids[:7]]
    _, to_decode, last_to_decode = p.decode[0].received
    expected = {**REQUEST[path], **sampling, "max_tokens": 36, "min_tokens": 1, "return_token_ids": True}
    pull = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": p.prefill[0].url,
        "remote_engine_id": "engine-a",
        "transfer_id": transfer["transfer_id"],
    }
    if path == CHAT:
        expected |= {"max_completion_tokens": 26, "kv_transfer_params": {"prompt_token_ids": so_far, **pull}}
    else:
        expected |= {"prompt": so_far, "kv_transfer_params": pull}
    assert to_decode.path == path
    assert to_decode.body == expected
    assert (last_to_decode.body["max_tokens"], last_to_decode.body["min_tokens"]) == (33, 0)


def test_a_completion_without_max_tokens_ends_after_sixteen() -> None:
    model = FakeModel(TEXT, cuts=[4, 3])
    got, p = answers(model, COMPLETIONS, {"max_tokens": None, "return_token_ids": True})
    assert [r.body["max_tokens"] for r in p.decode[0].received] == [None, 12, 9]
    assert got["choices"][0]["token_ids"] == model.ids[:16]


def test_a_request_given_up_before_its_first_token_is_simply_sent_again() -> None:
    model = FakeModel(TEXT, cuts=[0, 0])
    got, p = answers(model, COMPLETIONS, {"stream": True})
    assert joined(got)["text"] == TEXT
    assert len(joined(got)["heads"]) == 1
    assert [r.body["prompt"] for r in p.prefill[0].received] == ["say: "] * 3
    assert [r.body["prompt"] for r in p.decode[0].received] == ["say: "] * 3


def test_an_echoed_chat_message_is_not_taken_for_output() -> None:
    expected, got = cut_answers(FakeModel(TEXT), CHAT, {"stream": True, "echo": True, "return_token_ids": True}, [0, 3])
    assert got == expected


def test_prompt_logprobs_and_prompt_ids_are_the_first_part_s() -> None:
    body = {"prompt_logprobs": 1, "return_token_ids": True}
    expected, got = cut_answers(FakeModel(TEXT), COMPLETIONS, body, [5])
    assert got["choices"][0]["prompt_logprobs"]
    assert got == expected
