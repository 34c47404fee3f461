"""Where going on ends: bounds, requests that are not sent again, servers that can't go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, REQUEST, TEXT, a_pair, answer, answers, both_routes, joined, streamed_or_not
from fake_vllm import FakeModel, FakeVllmDecode, FakeVllmPrefill
from proxy_fakes import error_answer, hang, pair, until

from pd_integration.proxy.backends import Backend


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


def test_a_chat_server_that_does_not_say_is_asked_again() -> None:
    async def scenario() -> None:
        async with a_pair(FakeModel(TEXT)) as p:
            decode = p.decode[0]
            decode.aside_status = 401
            await answer(p, CHAT, {})
            assert decode.received[-1].body["vllm_xargs"] == {"recompute_fallback": "local"}
            decode.aside_status = 200
            await answer(p, CHAT, {})
            assert "vllm_xargs" not in decode.received[-1].body

    asyncio.run(scenario())


def test_a_server_that_was_down_is_asked_again() -> None:
    server = Backend("decode", "http://127.0.0.1:1", chat_parser=False)
    server.mark_down("restarted")
    assert server.chat_parser is None


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
