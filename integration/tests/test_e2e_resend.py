"""Requests that Decode gives up for want of room go on through Prefill: real engines, the answers of a plain run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pd_integration import deployment, models
from pd_integration.deployment import BLOCK_TOKENS, MODEL_NAME, Sizes
from pd_integration.servers import Server, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ONE_BLOCK = BLOCK_TOKENS * 4096  # the tiny model has 4 KiB of KV a token
SIZES = Sizes(max_model_len=1024, max_num_seqs=8, ample_blocks=400, decode_blocks=40, host_bytes=ONE_BLOCK)
NEW_TOKENS = 160
# Bytes only, most of them no whole character: text breaks in the middle of one at every second boundary.
BYTES = list(range(3, 259))
GREEDY = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "allowed_token_ids": BYTES}


@dataclass
class Servers:
    prefill: Server
    decode: Server
    proxy: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = models.write_model(tmp_path_factory.mktemp("model"))
    logs = tmp_path_factory.mktemp("logs")
    (bootstrap_port,) = free_ports(1)
    with deployment.prefill_server(model, logs, SIZES, bootstrap_port) as prefill, giving_up(model, logs) as decode:
        for server in (prefill, decode):
            server.wait_healthy()
        with deployment.proxy_server(prefill, bootstrap_port, decode, logs) as proxy:
            proxy.wait_healthy()
            yield Servers(prefill, decode, proxy)


def giving_up(model: Path, logs: Path) -> Server:
    """Decode with a small KV cache, a host that has room for one block, and `recompute_fallback: resend`."""
    decode = deployment.decode_server(model, logs, SIZES, deployment.ON)
    at = decode.command.index("--additional-config") + 1
    decode.command[at] = json.dumps({**json.loads(decode.command[at]), "recompute_fallback": "resend"})
    return decode


def requests(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Eight requests that want twice the KV cache."""
    made = []
    for number in range(8):
        text = f"{kind} {number}: " + "the cache of a request is kept on the host " * 3
        limits = {"max_tokens": NEW_TOKENS, "min_tokens": 20, "return_token_ids": number % 2 == 0}
        if kind.startswith("chat"):
            made.append((CHAT, {**GREEDY, **limits, "messages": [{"role": "user", "content": text}]}))
        else:
            made.append((COMPLETIONS, {**GREEDY, **limits, "prompt": text}))
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "completions": {},
    "completions, stream": {"stream": True, "stream_options": {"include_usage": True}},
    "completions, logprobs": {"logprobs": 0},
    "completions, stream, logprobs": {"stream": True, "logprobs": 0},
    "chat": {},
    "chat, stream": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "chat, logprobs": {"logprobs": True},
    "chat, stream, logprobs": {"stream": True, "logprobs": True},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_are_those_of_a_plain_run(servers: Servers, kind: str) -> None:
    bodies = [(path, {**body, **OPTIONS[kind]}) for path, body in requests(kind)]
    before = resends(servers)
    through_proxy = asyncio.run(ask_all(servers.proxy.url, bodies))
    resent = resends(servers) - before
    # Prefill itself, asked as a plain vLLM server: its KV cache is never full.
    plain = asyncio.run(ask_all(servers.prefill.url, bodies))
    for number, (got, expected) in enumerate(zip(through_proxy, plain, strict=True)):
        assert joined(got) == joined(expected), number
    assert resent > 0
    assert servers.decode.log_path.read_text().count("ends here to be sent to Prefill again") >= resent


@pytest.mark.parametrize("kind", ["completions", "chat, stream"])
def test_what_can_t_be_joined_is_recomputed_on_decode(servers: Servers, kind: str) -> None:
    more = {"logprobs": True, "top_logprobs": 2} if kind.startswith("chat") else {"logprobs": 2}
    bodies = [(path, {**body, **OPTIONS[kind], **more}) for path, body in requests(kind)]
    before = resends(servers), preemptions(servers)
    through_proxy = asyncio.run(ask_all(servers.proxy.url, bodies))
    assert resends(servers) == before[0]
    assert preemptions(servers) > before[1]
    plain = asyncio.run(ask_all(servers.prefill.url, bodies))
    for got, expected in zip(through_proxy, plain, strict=True):
        assert joined(got) == joined(expected)


async def ask_all(url: str, bodies: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """All at once; each answer as one object, or the objects of its stream."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as client:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            async with client.post(url + path, json=body) as response:
                content = await response.text()
                assert response.status == 200, content
            if not body.get("stream"):
                return json.loads(content)
            datas = re.findall(r"^data: (.*)$", content, re.MULTILINE)
            assert datas.pop() == "[DONE]"
            return [json.loads(data) for data in datas]

        return await asyncio.gather(*(ask(path, body) for path, body in bodies))


def joined(answer: Any) -> dict[str, Any]:
    """What an answer says, whatever its form."""
    chunks = answer if isinstance(answer, list) else [answer]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert "error" not in chunks[-1], chunks[-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [c["text"] if "text" in c else (c.get("delta") or c.get("message")).get("content", "") for c in choices]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    counts = [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usages]
    return {
        "text": "".join(texts),
        "roles": [r for c in choices if (r := (c.get("delta") or c.get("message") or {}).get("role"))],
        "prompt": [c["prompt_token_ids"] for c in [*chunks, *choices] if c.get("prompt_token_ids")],
        "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "names": [name for lp in logprobs for name in lp.get("tokens") or [e["token"] for e in lp["content"]]],
        "bytes": [entry["bytes"] for lp in logprobs for entry in lp.get("content") or ()],
        "offsets": [offset for lp in logprobs for offset in lp.get("text_offset") or ()],
        "ends": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
        "usage": counts[-1:],
        "continuous": [c[1] for c in counts] == sorted(c[1] for c in counts),
    }


def resends(servers: Servers) -> float:
    return metric(servers.proxy, "pd_proxy_resends_total")


def preemptions(servers: Servers) -> float:
    return metric(servers.decode, "vllm:num_preemptions_total")


def metric(server: Server, name: str) -> float:
    async def read() -> str:
        async with aiohttp.ClientSession() as client, client.get(f"{server.url}/metrics") as response:
            return await response.text()

    return sum(float(line.split()[-1]) for line in asyncio.run(read()).splitlines() if line.startswith(name))
