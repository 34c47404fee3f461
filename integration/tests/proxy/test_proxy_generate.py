"""A good request: what Prefill gets, what Decode gets, what the client sees."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from proxy_fakes import FakePrefill, FakeServer, chat_event, decode_answer, event, pair, prefill_answer, stream_then

PROMPT = {"model": "tiny", "prompt": "say hello", "max_tokens": 7}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say hello"}], "max_completion_tokens": 7}


def test_completion_goes_to_prefill_with_one_token_then_to_decode_as_it_was() -> None:
    async def scenario() -> None:
        async with pair() as p:
            status, answer = await p.ask(
                {**PROMPT, "temperature": 0.5, "seed": 1, "min_tokens": 3, "stop": ["x"], "return_token_ids": True}
            )
            assert status == 200
            assert answer["choices"][0]["text"] == "Hello"
            (to_prefill,), (to_decode,) = p.prefill[0].received, p.decode[0].received
            transfer_id = to_prefill.body["kv_transfer_params"]["transfer_id"]
            assert len(transfer_id) == 32
            assert to_prefill.path == to_decode.path == "/v1/completions"
            assert to_prefill.body == {
                "model": "tiny",
                "prompt": "say hello",
                "temperature": 0.5,
                "max_tokens": 1,
                "stream": False,
                "ignore_eos": True,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "transfer_id": transfer_id,
                },
            }
            assert to_decode.body == {
                **PROMPT,
                "temperature": 0.5,
                "seed": 1,
                "min_tokens": 3,
                "stop": ["x"],
                "return_token_ids": True,
                "kv_transfer_params": {
                    "do_remote_decode": False,
                    "do_remote_prefill": True,
                    "remote_bootstrap_addr": p.prefill[0].url,
                    "remote_engine_id": "engine-a",
                    "transfer_id": transfer_id,
                },
            }

    asyncio.run(scenario())


def test_chat_limits_both_token_fields_on_prefill() -> None:
    async def scenario() -> None:
        async with pair() as p:
            status, _ = await p.ask(CHAT, "/v1/chat/completions")
            assert status == 200
            (to_prefill,), (to_decode,) = p.prefill[0].received, p.decode[0].received
            assert to_prefill.path == to_decode.path == "/v1/chat/completions"
            assert to_prefill.body["max_tokens"] == to_prefill.body["max_completion_tokens"] == 1
            assert to_prefill.body["messages"] == to_decode.body["messages"] == CHAT["messages"]
            assert to_decode.body["max_completion_tokens"] == 7
            assert "max_tokens" not in to_decode.body

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "form"), [("/v1/completions", PROMPT, event), ("/v1/chat/completions", CHAT, chat_event)]
)
def test_stream_arrives_byte_for_byte_and_prefill_does_not_stream(path: str, body: dict, form: Any) -> None:
    async def scenario() -> None:
        async with pair() as p:
            body_with_usage = {**body, "stream_options": {"include_usage": True}}
            content = await p.read_stream(body_with_usage, path)
            assert content == form("Hel") + form("lo") + b"data: [DONE]\n\n"
            to_prefill = p.prefill[0].received[0].body
            assert to_prefill["stream"] is False
            assert "stream_options" not in to_prefill
            assert p.decode[0].received[0].body["stream_options"] == {"include_usage": True}

    asyncio.run(scenario())


def test_events_are_passed_on_as_they_come_not_at_the_end() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def end_when_told(request, response):
            await release.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        answer = stream_then([event("first")], end_when_told)
        async with pair(decode=[FakeServer(answer)]) as p, p.post({**PROMPT, "stream": True}) as response:
            first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 3)
            assert first == event("first")
            release.set()
            assert await response.read() == b"data: [DONE]\n\n"

    asyncio.run(scenario())


def test_events_cut_in_any_place_arrive_whole() -> None:
    async def scenario() -> None:
        content = event("a") + b": keep-alive\n\n" + event("böse") + b"data: [DONE]\n\n"
        pieces = [content[i : i + 1] for i in range(len(content))]
        async with pair(decode=[FakeServer(stream_then(pieces, None))]) as p:
            assert await p.read_stream(PROMPT) == content

    asyncio.run(scenario())


def test_every_request_has_its_own_transfer_id() -> None:
    async def scenario() -> None:
        async with pair() as p:
            await asyncio.gather(*(p.ask(PROMPT) for _ in range(20)))
            ids = [r.body["kv_transfer_params"]["transfer_id"] for r in p.prefill[0].received]
            assert len(set(ids)) == 20
            assert sorted(ids) == sorted(r.body["kv_transfer_params"]["transfer_id"] for r in p.decode[0].received)

    asyncio.run(scenario())


def test_decode_is_not_asked_before_prefill_has_answered() -> None:
    async def scenario() -> None:
        finish = asyncio.Event()

        async def answer(request, body):
            await finish.wait()
            return await prefill_answer("length")(request, body)

        async with pair(prefill=[FakePrefill(answer)]) as p:
            asked = asyncio.create_task(p.ask(PROMPT))
            await asyncio.sleep(0.2)
            assert p.prefill[0].running == 1
            assert p.decode[0].received == []
            finish.set()
            assert (await asked)[0] == 200

    asyncio.run(scenario())


def test_prefill_that_ended_by_a_stop_token_leaves_the_prompt_to_decode() -> None:
    # It kept no KV: a pull would wait for the connector's time-out.
    async def scenario() -> None:
        async with pair(prefill=[FakePrefill(prefill_answer("stop"))]) as p:
            assert (await p.ask(PROMPT))[0] == 200
            assert p.decode[0].received[0].body == {**PROMPT, "return_token_ids": True}
            assert b"pd_proxy_prefill_kept_nothing_total 1.0" in (await p.get("/metrics"))[1]

    asyncio.run(scenario())


def test_a_restarted_prefill_is_addressed_by_its_new_engine_id_at_once() -> None:
    async def scenario() -> None:
        async with pair(health_interval=60.0) as p:
            for engine in ("engine-a", "engine-b"):
                p.prefill[0].engines = {"0": engine}
                await p.ask(PROMPT)
                assert p.decode[0].received[-1].body["kv_transfer_params"]["remote_engine_id"] == engine

    asyncio.run(scenario())


def test_data_parallel_ranks_take_turns_and_rank_and_engine_id_agree() -> None:
    async def scenario() -> None:
        async with pair() as p:
            p.prefill[0].engines = {"0": "engine-0", "1": "engine-1"}
            for _ in range(4):
                await p.ask(PROMPT)
            ranks = [r.headers["X-data-parallel-rank"] for r in p.prefill[0].received]
            engines = [r.body["kv_transfer_params"]["remote_engine_id"] for r in p.decode[0].received]
            assert sorted(ranks) == ["0", "0", "1", "1"]
            assert engines == [f"engine-{rank}" for rank in ranks]
            assert "X-data-parallel-rank" not in p.decode[0].received[0].headers

    asyncio.run(scenario())


def test_headers_that_are_passed_on_and_those_that_are_not() -> None:
    async def scenario() -> None:
        async with pair() as p:
            sent = {
                "Authorization": "Bearer secret-key",
                "X-Request-Id": "my-request.1",
                "X-data-parallel-rank": "7",
                "Cookie": "a=b",
                "X-Other": "x",
            }
            async with p.post(PROMPT, headers=sent) as response:
                assert response.headers["X-Request-Id"] == "my-request.1"
            await p.get("/v1/models", headers=sent)
            for server in p.servers():
                for received in server.received:
                    assert received.headers["Authorization"] == "Bearer secret-key"
                    assert received.headers["X-Request-Id"] == "my-request.1"
                    assert not {"Cookie", "X-Other", "X-data-parallel-rank"} & received.headers.keys()
            assert len(p.decode[0].received) == 2

    asyncio.run(scenario())


def test_a_request_id_that_is_not_one_is_replaced() -> None:
    async def scenario() -> None:
        async with pair() as p:
            for bad in ("my secret text", "x" * 129, ""):
                async with p.post(PROMPT, headers={"X-Request-Id": bad}) as response:
                    assert response.status == 200
                    given = response.headers["X-Request-Id"]
                assert len(given) == 32
                assert p.prefill[0].received[-1].headers["X-Request-Id"] == given

    asyncio.run(scenario())


def test_one_client_gets_no_cookie_of_another() -> None:
    async def scenario() -> None:
        async def answer(request, body):
            response = await decode_answer()(request, body)
            response.set_cookie("session", "of-the-first-client")
            return response

        async with pair(decode=[FakeServer(answer)]) as p:
            await p.ask(PROMPT)
            async with p.post(PROMPT) as response:
                assert "Set-Cookie" not in response.headers
            assert all("Cookie" not in r.headers for s in p.servers() for r in s.received)

    asyncio.run(scenario())


def test_models_come_from_decode() -> None:
    async def scenario() -> None:
        async with pair() as p:
            status, content = await p.get("/v1/models")
            assert (status, json.loads(content)["data"]) == (200, [{"id": "tiny"}])
            assert p.prefill[0].received == []

    asyncio.run(scenario())
