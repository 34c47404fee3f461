"""Prefill servers without a bootstrap server: their answers say where the KV is, and Decode is told just that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from proxy_fakes import FakePrefill, FakeServer, decode_answer, pair

from pd_integration.proxy import Prefiller
from pd_integration.proxy.__main__ import parse_args

PROMPT = {"model": "tiny", "prompt": "say hello", "max_tokens": 7, "return_token_ids": True}
PLACE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5]],
    "remote_engine_id": "engine-a",
    "remote_host": "10.0.0.1",
    "remote_port": 28000,
}


def prefill_that_says(place: Any) -> FakePrefill:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        choice = {"index": 0, "text": "?", "finish_reason": "length"}
        return web.json_response({"id": "p", "choices": [choice], "kv_transfer_params": place})

    prefill = FakePrefill(answer)
    prefill.query_status = 500  # nobody may ask
    return prefill


def ask(prefill: FakePrefill, decode: FakeServer) -> tuple[int, dict[str, Any]]:
    async def scenario() -> tuple[int, dict[str, Any]]:
        async with pair([prefill], [decode], bootstrap=False) as p:
            return await p.ask(PROMPT)

    return asyncio.run(scenario())


def test_decode_gets_what_prefill_answered() -> None:
    prefill, decode = prefill_that_says(PLACE), FakeServer(decode_answer())
    status, answer = ask(prefill, decode)
    assert (status, answer["choices"][0]["text"]) == (200, "Hello")
    asked = prefill.received[0].body["kv_transfer_params"]
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    assert decode.received[0].body == {**PROMPT, "kv_transfer_params": PLACE}


@pytest.mark.parametrize("place", [None, {}])
def test_decode_computes_the_prompt_itself_where_prefill_kept_nothing(place: Any) -> None:
    decode = FakeServer(decode_answer())
    status, _ = ask(prefill_that_says(place), decode)
    assert status == 200
    assert decode.received[0].body == PROMPT


def test_an_answer_that_makes_no_sense_is_a_502() -> None:
    decode = FakeServer(decode_answer())
    status, answer = ask(prefill_that_says("here"), decode)
    assert status == 502
    assert "kv_transfer_params" in answer["error"]["message"]
    assert decode.received == []


def test_the_command_line() -> None:
    servers = ["--prefill", "http://a:1", "--prefill", "http://b:1", "--decode", "http://c:1"]
    config = parse_args([*servers, "--transfer-from-answer"])
    assert config.prefillers == (Prefiller("http://a:1"), Prefiller("http://b:1"))


def test_both_ways_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    servers = ["--prefill", "http://a:1", "--prefill-bootstrap", "http://a:2", "--decode", "http://c:1"]
    with pytest.raises(SystemExit) as stopped:
        parse_args([*servers, "--transfer-from-answer"])
    assert stopped.value.code == 2
    assert "leave one of the two out" in capsys.readouterr().err
