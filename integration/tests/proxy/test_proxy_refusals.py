"""What a client may not send: refused by name, and neither server hears of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from proxy_fakes import pair

PROMPT = {"model": "tiny", "prompt": "say hello"}
ATTACK = {"do_remote_prefill": True, "remote_bootstrap_addr": "http://evil.example:1", "transfer_id": "x"}


def with_attack(template: str) -> bytes:
    return template.replace("ATTACK", json.dumps(ATTACK)).encode()


def refused(body: Any, path: str = "/v1/completions", **settings: Any) -> tuple[int, dict[str, Any]]:
    """The proxy's answer, with proof that nothing was forwarded."""

    async def scenario() -> tuple[int, dict[str, Any]]:
        async with pair(**settings) as p:
            async with p.post(body, path) as response:
                answer = json.loads(await response.read())
                assert response.headers["X-PD-Error-Side"] == "proxy"
            assert [server.received for server in p.servers()] == [[], []]
            assert answer["error"]["code"] == response.status
            return response.status, answer["error"]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"kv_transfer_params": ATTACK}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params": "text"}, "kv_transfer_params"),
        ({"ec_transfer_params": ATTACK}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": ATTACK}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": None}}, "vllm_xargs.kv_transfer_params"),
        ({"extra_body": {"kv_transfer_params": ATTACK}}, "extra_body.kv_transfer_params"),
        ({"extra_args": {"a": [{"kv_transfer_params": ATTACK}]}}, "extra_args.a.kv_transfer_params"),
        (
            {"sampling_params": {"extra_args": {"kv_transfer_params": 1}}},
            "sampling_params.extra_args.kv_transfer_params",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_transfer_parameters_of_a_client_are_refused_wherever_they_hide(extra: dict, field: str, path: str) -> None:
    status, error = refused({**PROMPT, **extra}, path)
    assert (status, error["param"]) == (400, field)
    assert field in error["message"]


def test_transfer_parameters_spelled_with_escapes_or_twice_are_refused() -> None:
    for body in (
        '{"prompt": "x", "kv_transfer_par\\u0061ms": ATTACK}',
        '{"prompt": "x", "kv_transfer_params": null, "kv_transfer_params": ATTACK}',
    ):
        assert refused(with_attack(body))[1]["param"] == "kv_transfer_params"


def test_of_two_spellings_of_one_field_only_what_was_checked_is_forwarded() -> None:
    async def scenario() -> None:
        async with pair() as p:
            body = '{"prompt": "x", "kv_transfer_params": ATTACK, "kv_transfer_params": null}'
            assert (await p.ask(with_attack(body)))[0] == 200
            for server in p.servers():
                assert "evil" not in json.dumps(server.received[0].body)

    asyncio.run(scenario())


def test_null_transfer_parameters_are_dropped() -> None:
    async def scenario() -> None:
        async with pair() as p:
            assert (await p.ask({**PROMPT, "kv_transfer_params": None, "ec_transfer_params": None}))[0] == 200
            assert "ec_transfer_params" not in p.decode[0].received[0].body
            assert p.decode[0].received[0].body["kv_transfer_params"]["remote_engine_id"] == "engine-a"

    asyncio.run(scenario())


def test_a_tool_whose_schema_has_such_a_name_is_content() -> None:
    async def scenario() -> None:
        tools = [{"type": "function", "function": {"parameters": {"properties": {"kv_transfer_params": {}}}}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": tools}
        async with pair() as p:
            assert (await p.ask(body, "/v1/chat/completions"))[0] == 200
            assert p.decode[0].received[0].body["tools"] == tools

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 7.5}, "max_tokens"),
        ({"max_completion_tokens": []}, "max_completion_tokens"),
        ({"min_tokens": "1"}, "min_tokens"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", 7]}, "stop"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"structured_outputs": "x"}, "structured_outputs"),
    ],
)
def test_unusable_fields_are_refused_by_name(extra: dict, field: str) -> None:
    status, error = refused({**PROMPT, **extra})
    assert (status, error["param"]) == (400, field)
    assert field in error["message"]


@pytest.mark.parametrize(
    "prompt", ["text", ["one prompt"], [1, 2, 3], [[1, 2, 3]]], ids=["text", "text list", "tokens", "token list"]
)
def test_one_prompt_in_any_form_is_served(prompt: Any) -> None:
    async def scenario() -> None:
        async with pair() as p:
            assert (await p.ask({"model": "tiny", "prompt": prompt, "n": 1}))[0] == 200
            assert [server.received[0].body["prompt"] for server in p.servers()] == [prompt, prompt]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_bad_json_is_a_400(content: bytes) -> None:
    status, error = refused(content)
    assert status == 400
    assert error["type"] == "BadRequestError"


def test_a_body_above_the_limit_is_a_413_that_names_the_limit() -> None:
    status, error = refused({"prompt": "x" * 2000}, max_body_bytes=1000)
    assert status == 413
    assert "1000" in error["message"]


def test_unknown_routes_and_methods_are_openai_errors_too() -> None:
    async def scenario() -> None:
        async with pair() as p:
            status, answer = await p.ask({}, "/v1/embeddings")
            assert (status, answer["error"]["code"]) == (404, 404)
            status, content = await p.get("/v1/completions")
            assert (status, json.loads(content)["error"]["code"]) == (405, 405)

    asyncio.run(scenario())
