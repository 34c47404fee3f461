"""Asking the proxy, or a server, and reading what an answer holds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_vllm import FakeModel, FakeVllmDecode, FakeVllmPrefill
from proxy_fakes import Pair, pair

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
