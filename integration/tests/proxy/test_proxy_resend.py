"""A request that Decode gave up goes on: the client's answer is the one it would have had."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from fake_vllm import FakeModel, FakeVllmDecode, FakeVllmPrefill
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_fakes import Pair, error_answer, hang, pair, until

from pd_integration.proxy.sse import DONE, event_data

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "One ok €2, x€ or €y: köln 東京 \U0001f600!"
REQUEST = {
    COMPLETIONS: {"model": "tiny", "prompt": "say: ", "max_tokens": 400},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "say"}]},
}
both_routes = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def a_pair(model: FakeModel, **settings: Any) -> Any:
    return pair([FakeVllmPrefill(model)], [FakeVllmDecode(model)], **settings)


async def answer(p: Pair, path: str, body: dict[str, Any], url: str | None = None) -> Any:
    """The whole answer of the proxy, or of the server at `url`; of a stream the events as objects."""
    headers = {"X-Request-Id": "r1"}
    async with p.client.post((url or p.url) + path, json={**REQUEST[path], **body}, headers=headers) as response:
        content = await response.read()
        assert response.status == 200, content
    if not body.get("stream"):
        return json.loads(content)
    datas = [event_data(event + b"\n\n") for event in content.split(b"\n\n") if event]
    assert datas[-1] == DONE
    return [json.loads(data) for data in datas[:-1] if data]


def answers(model: FakeModel, path: str, body: dict[str, Any], **settings: Any) -> tuple[Any, Pair]:
    async def scenario() -> tuple[Any, Pair]:
        async with a_pair(model, **settings) as p:
            return await answer(p, path, body), p

    return asyncio.run(scenario())


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


def joined(got: Any) -> Any:
    """What an answer holds, however it was cut into events."""
    if isinstance(got, dict):
        return got
    choices = [choice for chunk in got for choice in chunk["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "heads": {(chunk["id"], chunk["created"], chunk["model"]) for chunk in got},
        "roles": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", ())],
        "text": "".join(choice.get("text", choice.get("delta", {}).get("content")) for choice in choices),
        "prompt": [c.get("prompt_token_ids") for c in [*got, *choices] if c.get("prompt_token_ids")],
        "ids": [t for choice in choices for t in choice.get("token_ids") or ()],
        "logprobs": {key: [v for lp in logprobs for v in lp[key]] for key in (logprobs[0] if logprobs else ())},
        "ends": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
        "usage": got[-1].get("usage"),
        "fingerprints": [chunk["system_fingerprint"] for chunk in got if "system_fingerprint" in chunk],
    }


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


@streamed_or_not
@both_routes
def test_resends_are_bounded_and_counted(path: str, stream: bool) -> None:
    async def scenario() -> None:
        async with a_pair(FakeModel(TEXT, cuts=[1] * 9), max_resends=2) as p:
            async with p.post({**REQUEST[path], "stream": stream}, path) as response:
                content = await response.read()
            if stream:
                *_, error, done, _ = content.split(b"\n\n")
                assert (response.status, done) == (200, b"data: [DONE]")
                error = json.loads(error.removeprefix(b"data: "))["error"]
            else:
                assert (response.status, response.headers["X-PD-Error-Side"]) == (503, "decode")
                error = json.loads(content)["error"]
            assert error["code"] == 503
            assert "max_resends" in error["message"]
            assert len(p.decode[0].received) == len(p.prefill[0].received) == 3
            assert b"pd_proxy_resends_total 2.0" in (await p.get("/metrics"))[1]

    asyncio.run(scenario())


def test_each_part_goes_to_the_least_loaded_decode_server() -> None:
    async def scenario() -> None:
        model = FakeModel(TEXT, cuts=[3])
        first, second = FakeVllmDecode(model), FakeVllmDecode(FakeModel(TEXT))
        async with pair([FakeVllmPrefill(model)], [first, second]) as p:
            got = await answer(p, COMPLETIONS, {"return_token_ids": True})
            assert got["choices"][0]["token_ids"] == model.ids
            assert (len(first.received), len(second.received)) == (1, 1)

    asyncio.run(scenario())


@streamed_or_not
@pytest.mark.parametrize("stop", ["recomputed", ["x", "recomputed"]])
def test_a_client_s_own_stop_string_of_that_name_is_an_end(stream: bool, stop: Any) -> None:
    got, p = answers(FakeModel(TEXT, cuts=[4]), COMPLETIONS, {"stream": stream, "stop": stop})
    choice = (got[-1] if stream else got)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "recomputed")
    assert len(p.decode[0].received) == 1


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NOT_JOINED = [
    (CHAT, {"tools": TOOLS}, "tool parser"),
    (CHAT, {"tools": TOOLS, "tool_choice": "none"}, "tool parser"),
    (CHAT, {"logprobs": True, "top_logprobs": 2}, "alternative"),
    (COMPLETIONS, {"logprobs": 2}, "alternative"),
    (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [3]}, "alternative"),
    (COMPLETIONS, {"echo": True}, "echo"),
]


@streamed_or_not
@pytest.mark.parametrize(("path", "body", "why"), NOT_JOINED)
def test_what_can_t_be_joined_exactly_is_marked_and_passed_on(path: str, body: dict, why: str, stream: bool) -> None:
    body = {**body, "stream": stream, "vllm_xargs": {"mine": 1}}
    got, p = answers(FakeModel(TEXT), path, body)
    (to_decode,) = p.decode[0].received
    assert to_decode.body["vllm_xargs"] == {"mine": 1, "recompute_fallback": "local"}
    assert "return_token_ids" not in to_decode.body
    assert "vllm_xargs" not in p.prefill[0].received[0].body or p.prefill[0].received[0].body["vllm_xargs"] == {
        "mine": 1
    }
    text = joined(got)["text"] if stream else (got["choices"][0].get("text") or got["choices"][0]["message"]["content"])
    assert text == TEXT


@pytest.mark.parametrize(("path", "body", "why"), NOT_JOINED)
@streamed_or_not
def test_if_decode_gives_it_up_all_the_same_the_error_says_why(path: str, body: dict, why: str, stream: bool) -> None:
    async def scenario() -> None:
        async with a_pair(FakeModel(TEXT, cuts=[4])) as p:
            async with p.post({**REQUEST[path], **body, "stream": stream}, path) as response:
                content = (await response.read()).decode()
            assert response.status == (200 if stream else 502)
            assert why in content
            assert "recompute_fallback" in content
            assert content.endswith("data: [DONE]\n\n") == stream
            assert len(p.decode[0].received) == 1

    asyncio.run(scenario())


def test_only_what_can_t_be_joined_is_marked() -> None:
    for path, body in ((COMPLETIONS, {"logprobs": 0, "stop": ["x"], "seed": 1}), (CHAT, {"logprobs": True})):
        _, p = answers(FakeModel(TEXT), path, body)
        assert "vllm_xargs" not in p.decode[0].received[0].body


def test_a_chat_server_with_a_parser_is_found_out_once_and_its_requests_marked() -> None:
    async def scenario() -> None:
        model = FakeModel(TEXT)
        decode = FakeVllmDecode(model)
        decode.chat_parser = True
        async with pair([FakeVllmPrefill(model)], [decode]) as p:
            for _ in range(2):
                await answer(p, CHAT, {})
                assert decode.received[-1].body["vllm_xargs"] == {"recompute_fallback": "local"}
            await answer(p, COMPLETIONS, {})
            assert "vllm_xargs" not in decode.received[-1].body
            assert len(decode.asides) == 1

    asyncio.run(scenario())


@streamed_or_not
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_that_fails_the_second_time_ends_the_answer_with_its_error(side: str, stream: bool) -> None:
    error = {"error": {"message": "no room", "type": "E", "param": None, "code": 507}}

    async def scenario() -> None:
        async with a_pair(FakeModel(TEXT, cuts=[4])) as p:
            server = p.prefill[0] if side == "prefill" else p.decode[0]
            good = server.answer

            async def fails_later(request: Any, body: dict[str, Any]) -> Any:
                return await (good if len(server.received) == 1 else error_answer(507, error))(request, body)

            server.answer = fails_later
            async with p.post({**REQUEST[COMPLETIONS], "stream": stream}) as response:
                content = await response.read()
            if stream:
                assert content.endswith(b"data: [DONE]\n\n")
                assert json.loads(content.split(b"\n\n")[-3].removeprefix(b"data: ")) == error
            else:
                assert (response.status, json.loads(content)) == (507, error)
            await until(lambda: p.decode[0].running == p.prefill[0].running == 0)

    asyncio.run(scenario())


def test_a_client_that_leaves_between_two_parts_is_noticed_by_prefill() -> None:
    async def scenario() -> None:
        async with a_pair(FakeModel(TEXT, cuts=[4])) as p:
            prefill = p.prefill[0]
            good = prefill.answer

            async def hangs_later(request: Any, body: dict[str, Any]) -> Any:
                return await (good if len(prefill.received) == 1 else hang)(request, body)

            prefill.answer = hangs_later
            async with p.post({**REQUEST[COMPLETIONS], "stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                await until(lambda: prefill.running == 1)
                response.close()
            await until(lambda: prefill.cancelled == 1)
            assert len(p.decode[0].received) == 1

    asyncio.run(scenario())


EURO_BEHIND_X = FakeModel("x€").ids[:1]  # the token holds "x" and the first byte of "€"


def no_ids(model: FakeModel, prefill: FakeVllmPrefill, decode: FakeVllmDecode) -> None:
    good = decode.answer
    decode.answer = lambda request, body: good(request, {**body, "return_token_ids": False})


def another_prompt(model: FakeModel, prefill: FakeVllmPrefill, decode: FakeVllmDecode) -> None:
    good = decode.answer

    async def one_more(request: Any, body: dict[str, Any]) -> Any:
        more = [model.ids[1]] if isinstance(body["prompt"], list) else ""
        return await good(request, {**body, "prompt": body["prompt"] + more})

    decode.answer = one_more


def another_text(model: FakeModel, prefill: FakeVllmPrefill, decode: FakeVllmDecode) -> None:
    """Decode's detokenizer goes on in the middle of a character, as Prefill's does not."""
    of_prompt = model.texts
    other = FakeModel(TEXT)
    other.texts = lambda prompt, ids: of_prompt([], ids) if prompt[-1:] == EURO_BEHIND_X else of_prompt(prompt, ids)
    other.ids, decode.model = model.ids, other


def no_half_characters(model: FakeModel, prefill: FakeVllmPrefill, decode: FakeVllmDecode) -> None:
    """Prefill's detokenizer goes on in the middle of a character."""
    other = FakeModel(TEXT)
    other.texts = lambda prompt, ids: ["a"]
    other.ids, prefill.model = model.ids, other


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (no_ids, "token ids that it was asked for"),
        (another_prompt, "did not go on from the token ids"),
        (another_text, "does not go on from the text"),
        (no_half_characters, "in the middle of a character"),
    ],
)
@streamed_or_not
def test_a_server_that_can_t_go_on_is_an_error_not_a_wrong_answer(broken: Any, said: str, stream: bool) -> None:
    async def scenario() -> None:
        model = FakeModel("x€, x", cuts=[1])
        assert model.ids[:1] == EURO_BEHIND_X
        prefill, decode = FakeVllmPrefill(model), FakeVllmDecode(model)
        broken(model, prefill, decode)
        async with pair([prefill], [decode]) as p, p.post({**REQUEST[COMPLETIONS], "stream": stream}) as response:
            content = (await response.read()).decode()
            assert response.status == (200 if stream else 502)
            assert said in content

    asyncio.run(scenario())
