"""No log holds what a client wrote, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from proxy_fakes import FakePrefill, FakeServer, Pair, drop, error_answer, event, hang, pair, stream_then

from pd_integration.proxy import bodies

SECRET = "tulip-sonnet-4711"
PROMPT = {"model": SECRET, "prompt": f"my secret is {SECRET}", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": SECRET}]}
ECHO = {"error": {"message": f"prompt {SECRET} is too long", "type": "BadRequestError", "param": None, "code": 400}}

GIVEN_UP_TEXT = {"choices": [{"index": 0, "text": SECRET, "finish_reason": "stop", "stop_reason": "recomputed"}]}
GIVEN_UP = {"choices": [{**GIVEN_UP_TEXT["choices"][0], "text": "", "token_ids": [], "prompt_token_ids": [1]}]}


async def talk(p: Pair) -> None:
    """All kinds of requests, each with the secret in some place."""
    requests: list[tuple[Any, str]] = [
        (PROMPT, "/v1/completions"),
        ({**PROMPT, "stream": True}, "/v1/completions"),
        (CHAT, "/v1/chat/completions"),
        ({**PROMPT, "n": SECRET}, "/v1/completions"),
        ({**PROMPT, "kv_transfer_params": {"x": SECRET}}, "/v1/completions"),
        ({**PROMPT, SECRET: {"kv_transfer_params": 1}}, "/v1/completions"),
        (f'{{"prompt": "{SECRET}'.encode(), "/v1/completions"),
        (PROMPT, f"/v1/completions?prompt={SECRET}"),
        (PROMPT, f"/v1/{SECRET}"),
    ]
    for body, path in requests:
        async with p.post(body, path, headers={"X-Request-Id": f"id {SECRET}", "Authorization": SECRET}) as response:
            await response.read()
    for raw in (
        f"{SECRET}\r\n\r\n",
        f"POST /v1/completions HTTP/1.1\r\n{SECRET}\r\n\r\n",
        f"GET /{SECRET} HTTP/9\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(p.url.rsplit(":", 1)[1]))
        writer.write(raw.encode())
        await asyncio.wait_for(reader.read(), 5)
        writer.close()


BEHAVIOURS: dict[str, dict[str, Any]] = {
    "good": {},
    "prefill refuses and quotes": {"prefill": FakePrefill(error_answer(400, ECHO))},
    "decode refuses and quotes": {"decode": FakeServer(error_answer(400, ECHO))},
    "decode answers text": {"decode": FakeServer(error_answer(500, f"Traceback {SECRET}"))},
    "decode dies": {"decode": FakeServer(drop)},
    "decode dies in mid-stream": {"decode": FakeServer(stream_then([event(SECRET)], drop))},
    "decode begins with an error": {
        "decode": FakeServer(stream_then([f'data: {{"error": {{"message": "{SECRET}"}}}}\n\n'.encode()], None))
    },
    "prefill answers nonsense": {"prefill": FakePrefill(error_answer(200, SECRET))},
    "decode gives it up": {"decode": FakeServer(error_answer(200, GIVEN_UP)), "max_resends": 1},
    "decode gives it up without token ids": {"decode": FakeServer(error_answer(200, GIVEN_UP_TEXT))},
    "decode is slow": {"decode": FakeServer(hang), "total_timeout": 0.1},
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_no_log_line_quotes_the_client(behaviour: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = dict(BEHAVIOURS[behaviour])
    prefill = [settings.pop("prefill")] if "prefill" in settings else None
    decode = [settings.pop("decode")] if "decode" in settings else None

    async def scenario() -> None:
        async with pair(prefill, decode, **settings) as p:
            await talk(p)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())
    assert "/v1/completions: status" in caplog.text
    assert SECRET not in _all_text(caplog)


def test_an_error_in_the_proxy_itself_is_a_500_that_quotes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(body: dict, transfer: object) -> dict:
        raise KeyError(body["prompt"])

    async def scenario() -> None:
        async with pair() as p:
            status, answer = await p.ask(PROMPT)
            assert status == 500
            assert SECRET not in str(answer)

    monkeypatch.setattr(bodies, "for_decode", fail)
    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())
    assert "KeyError at fail:" in caplog.text
    assert SECRET not in _all_text(caplog)


def _all_text(caplog: pytest.LogCaptureFixture) -> str:
    """Messages, tracebacks and raw arguments of every record, of all loggers."""
    return caplog.text + repr([(r.msg, r.args, r.exc_info, r.exc_text) for r in caplog.records])
