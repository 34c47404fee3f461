"""What the client sees when a server fails, and what the other server is told."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from proxy_fakes import (
    FakePrefill,
    FakeServer,
    decode_answer,
    drop,
    error_answer,
    event,
    hang,
    pair,
    prefill_answer,
    stream_then,
    until,
)

PROMPT = {"model": "tiny", "prompt": "say hello"}
STREAMED = {**PROMPT, "stream": True}
VLLM_ERROR = {"error": {"message": "no such model", "type": "NotFoundError", "param": None, "code": 404}}
STREAM_ERROR = {"error": {"message": "KV load failed", "type": "InternalServerError", "param": None, "code": 500}}


def fails(
    body: dict, prefill: Any = None, decode: Any = None, **settings: Any
) -> tuple[int, str, dict[str, Any], dict[str, str]]:
    """Status, side, body and headers of the error that the client gets."""

    async def scenario() -> tuple[int, str, dict[str, Any], dict[str, str]]:
        prefills, decodes = [FakePrefill(prefill)], [FakeServer(decode or decode_answer())]
        async with pair(prefills, decodes, **settings) as p, p.post(body) as response:
            answer = json.loads(await response.read())
            side = response.headers["X-PD-Error-Side"]
            assert "message" in answer["error"]
            if side == "prefill":
                assert p.decode[0].received == []
            assert side.encode() in (await p.get("/metrics"))[1]
            await until(lambda: not any(server.running for server in p.servers()))
            return response.status, side, answer, dict(response.headers)

    return asyncio.run(scenario())


@pytest.mark.parametrize("body", [PROMPT, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_status_and_body_of_a_server_s_error_reach_the_client(side: str, body: dict) -> None:
    answer = error_answer(404, VLLM_ERROR, {"Retry-After": "3", "X-Internal": "no"})
    status, failed, content, headers = fails(body, **{side: answer})
    assert (status, failed, content) == (404, side, VLLM_ERROR)
    assert headers["Retry-After"] == "3"
    assert "X-Internal" not in headers


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_error_in_another_form_is_wrapped(side: str) -> None:
    for body in ({"detail": "who are you"}, {"error": "who are you"}, "who are you"):
        status, failed, content, _ = fails(PROMPT, **{side: error_answer(401, body)})
        assert (status, failed, content["error"]["code"]) == (401, side, 401)
        assert content["error"]["message"] == f"the {side} server answered status 401: who are you"


@pytest.mark.parametrize("body", [PROMPT, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_error_without_a_reason_says_whose_log_has_it(side: str, body: dict) -> None:
    silent = {"error": {**VLLM_ERROR["error"], "message": ""}}
    status, failed, content, _ = fails(body, **{side: error_answer(500, silent)})
    assert (status, failed) == (500, side)
    assert content["error"]["message"] == f"the {side} server answered status 500 and gave no reason; its log has it"
    assert content["error"]["type"] == VLLM_ERROR["error"]["type"]


@pytest.mark.parametrize("body", [PROMPT, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_that_dies_is_a_502(side: str, body: dict) -> None:
    status, failed, _, _ = fails(body, **{side: drop})
    assert (status, failed) == (502, side)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_redirect_is_not_followed(side: str) -> None:
    # It would carry the client's key to a host of the server's choosing.
    status, failed, content, _ = fails(PROMPT, **{side: error_answer(307, "", {"Location": "http://127.0.0.1:1/"})})
    assert (status, failed) == (502, side)
    assert "307" in content["error"]["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("text", ["<html>", "[]", ""])
def test_a_200_that_is_not_a_json_object_is_a_502(side: str, text: str) -> None:
    status, failed, _, _ = fails(PROMPT, **{side: error_answer(200, text)})
    assert (status, failed) == (502, side)


def test_a_prefill_answer_without_choices_is_a_502() -> None:
    assert fails(PROMPT, prefill=error_answer(200, {"choices": []}))[:2] == (502, "prefill")


@pytest.mark.parametrize("query", [{}, {"0": {}}, {"x": {"engine_id": "e"}}, {"0": 1}])
def test_a_bootstrap_server_without_engine_ids_is_a_502(query: Any) -> None:
    async def scenario() -> None:
        async with pair() as p:
            p.prefill[0].query = query
            status, answer = await p.ask(PROMPT)
            assert status == 502
            assert "bootstrap" in answer["error"]["message"]
            assert [server.received for server in p.servers()] == [[], []]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "slow", "body"),
    [
        ({"prefill_timeout": 0.2}, {"prefill": hang}, PROMPT),
        ({"first_byte_timeout": 0.2}, {"decode": hang}, STREAMED),
        ({"first_byte_timeout": 0.2}, {"decode": stream_then([], hang)}, STREAMED),
        ({"total_timeout": 0.2}, {"decode": hang}, PROMPT),
        ({"total_timeout": 0.2}, {"prefill": hang}, PROMPT),
    ],
    ids=["prefill", "decode headers", "decode first event", "total on decode", "total on prefill"],
)
def test_a_server_that_is_too_slow_is_a_504_and_is_let_go(settings: dict, slow: dict, body: dict) -> None:
    status, _, content, _ = fails(body, **slow, **settings)
    assert status == 504
    assert f"{next(iter(settings))} of 0.2 s" in content["error"]["message"]


def test_a_slow_stream_within_the_limits_is_served() -> None:
    async def scenario() -> None:
        answer = decode_answer(("a", "b", "c", "d"), pause=0.2)
        async with pair(decode=[FakeServer(answer)], idle_timeout=0.5, first_byte_timeout=0.5) as p:
            assert (await p.read_stream(PROMPT)).endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


def test_an_error_as_first_event_is_still_an_http_error() -> None:
    first = b"data: " + json.dumps(STREAM_ERROR).encode() + b"\n\n"
    status, side, content, _ = fails(STREAMED, decode=stream_then([first, b"data: [DONE]\n\n"], None))
    assert (status, side, content) == (500, "decode", STREAM_ERROR)


def test_a_stream_without_events_is_a_502() -> None:
    assert fails(STREAMED, decode=stream_then([], None))[:2] == (502, "decode")


def broken_stream(answer: Any, **settings: Any) -> tuple[bytes, dict[str, Any]]:
    """What came before the error event, and the error; the stream must end in good order."""

    async def scenario() -> tuple[bytes, dict[str, Any]]:
        async with pair(decode=[FakeServer(answer)], **settings) as p:
            content = await p.read_stream(PROMPT)
            await until(lambda: p.decode[0].running == 0)
            assert b'pd_proxy_errors_total{side="' in (await p.get("/metrics"))[1]
        head, error, done, rest = content.rsplit(b"\n\n", 3)
        assert (done, rest) == (b"data: [DONE]", b"")
        return head + b"\n\n", json.loads(error.removeprefix(b"data: "))["error"]

    return asyncio.run(scenario())


def test_decode_dies_in_mid_stream_in_the_middle_of_an_event() -> None:
    head, error = broken_stream(stream_then([event("Hel"), event("lo")[:-7]], drop))
    assert head == event("Hel")
    assert error["code"] == 502


def test_a_stream_that_ends_without_done_is_an_error() -> None:
    head, error = broken_stream(stream_then([event("Hel")], None))
    assert head == event("Hel")
    assert "[DONE]" in error["message"]


def test_a_stream_that_falls_silent_is_ended() -> None:
    head, error = broken_stream(stream_then([event("Hel")], hang), idle_timeout=0.2)
    assert head == event("Hel")
    assert error["code"] == 504
    assert "idle_timeout" in error["message"]


def test_a_stream_above_the_total_time_is_ended() -> None:
    head, error = broken_stream(decode_answer(("x",) * 100, pause=0.05), total_timeout=0.3)
    assert head.startswith(event("x"))
    assert "total_timeout" in error["message"]


def test_decode_s_own_error_event_is_passed_on_as_it_is() -> None:
    async def scenario() -> None:
        chunks = [event("Hel"), b"data: " + json.dumps(STREAM_ERROR).encode() + b"\n\n", b"data: [DONE]\n\n"]
        async with pair(decode=[FakeServer(stream_then(chunks, None))]) as p:
            assert await p.read_stream(PROMPT) == b"".join(chunks)

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [PROMPT, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_client_that_leaves_is_noticed_by_the_server_at_work(at: str, body: dict) -> None:
    async def scenario() -> None:
        prefills = [FakePrefill(hang if at == "prefill" else prefill_answer("length"))]
        async with pair(prefills, [FakeServer(hang)]) as p:
            server = p.prefill[0] if at == "prefill" else p.decode[0]
            asked = asyncio.create_task(p.ask(body))
            await until(lambda: server.running == 1)
            asked.cancel()
            await until(lambda: server.cancelled == 1)
            assert at == "decode" or p.decode[0].received == []
            await until_metric(p, b"pd_proxy_client_disconnects_total 1.0")
            assert json.loads((await p.get("/health"))[1])[at][0]["in_flight"] == 0

    asyncio.run(scenario())


def test_a_client_that_leaves_in_mid_stream_ends_it_on_decode() -> None:
    async def scenario() -> None:
        async with pair(decode=[FakeServer(decode_answer(("x",) * 1000, pause=0.02))]) as p:
            async with p.post(STREAMED) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
            await until(lambda: p.decode[0].running == 0)
            assert p.decode[0].cancelled == 1
            await until_metric(p, b"pd_proxy_client_disconnects_total 1.0")

    asyncio.run(scenario())


def test_clients_that_leave_while_the_proxy_writes_are_no_errors_of_the_proxy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with pair(decode=[FakeServer(decode_answer(("x" * 5000,) * 1000))]) as p:

            async def leave_early() -> None:
                async with p.post(STREAMED) as response:
                    await response.content.readany()
                    response.close()

            await asyncio.gather(*(leave_early() for _ in range(20)))
            await until_metric(p, b"pd_proxy_client_disconnects_total 20.0")
            await until(lambda: p.decode[0].running == 0)

    asyncio.run(scenario())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("pd_integration")] == []


async def until_metric(p: Any, line: bytes) -> None:
    for _ in range(200):
        if line in (await p.get("/metrics"))[1]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {line!r} in /metrics")
