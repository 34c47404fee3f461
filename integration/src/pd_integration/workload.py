"""The streaming workload: requests sent a few at a time to an OpenAI endpoint, every token id and its time kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

STALL_TIMEOUT_S = 60.0
SAME_ARRIVAL_S = 0.001
_TEXT = "the cache of a request that waits is kept on the host until its turn comes "


class WorkloadError(RuntimeError):
    """A request failed, or no request got a token for too long."""


@dataclass(frozen=True)
class Request:
    """One completion request; ``id`` is sent as X-Request-Id, so that it is found again in the engine's trace."""

    id: str
    prompt: str
    max_tokens: int


@dataclass
class Result:
    """What came back: token ids, and for each streamed event with tokens its time (since the epoch) and token count."""

    request: Request
    start: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def latencies(self) -> list[float]:
        """Inter-token latency of each token after the first arrival, in seconds.

        Tokens that come within `SAME_ARRIVAL_S` are one arrival (a busy server sends several events at a time): they
        share the time since the arrival before.
        """
        arrivals: list[tuple[float, int]] = []  # time, tokens
        for t, count in zip(self.times, self.counts, strict=True):
            if arrivals and t - arrivals[-1][0] < SAME_ARRIVAL_S:
                first, before = arrivals.pop()
                arrivals.append((first, before + count))
            else:
                arrivals.append((t, count))
        latencies: list[float] = []
        for (earlier, _), (t, count) in itertools.pairwise(arrivals):
            latencies += [(t - earlier) / count] * count
        return latencies


def make_requests(count: int, prompt_tokens: int, max_tokens: int, seed: int = 0) -> list[Request]:
    """``count`` requests with different prompts of about ``prompt_tokens`` (a token is a byte), the same for a seed."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        length = prompt_tokens + rng.randrange(-prompt_tokens // 8, prompt_tokens // 8 + 1)
        text = f"Request {number}: "
        while len(text) < length:
            text += rng.choice(_TEXT.split()) + " "
        requests.append(Request(f"r{number:03d}", text[:length], max_tokens))
    return requests


async def run(
    url: str,
    model: str,
    requests: Sequence[Request],
    concurrency: int,
    on_tokens: Callable[[int], None] = lambda count: None,
    check: Callable[[], None] = lambda: None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> list[Result]:
    """Send ``requests`` to ``url``, at most ``concurrency`` at once, and return their results in the same order.

    ``on_tokens`` gets the number of new tokens of each event. ``check`` is called twice a second and may raise, when a
    server has died for instance. Raises WorkloadError when a request fails, ends early, or when no token at all arrives
    for ``stall_timeout_s``.
    """
    last_token = time.monotonic()

    def tokens(count: int) -> None:
        nonlocal last_token
        last_token = time.monotonic()
        on_tokens(count)

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            check()
            if (silent := time.monotonic() - last_token) > stall_timeout_s:
                raise WorkloadError(f"no request got a token for {silent:.0f} s")

    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, request: Request) -> Result:
        async with gate:
            return await _complete(session, url, model, request, tokens)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        watcher = asyncio.create_task(watch())
        work = [asyncio.create_task(one(session, request)) for request in requests]
        results = asyncio.gather(*work)
        either: list[asyncio.Future[Any]] = [results, watcher]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if watcher.done():
                watcher.result()
            return await results
        finally:
            for task in (watcher, *work):
                task.cancel()
            await asyncio.gather(watcher, results, *work, return_exceptions=True)


async def _complete(
    session: aiohttp.ClientSession, url: str, model: str, request: Request, on_tokens: Callable[[int], None]
) -> Result:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    result = Result(request, start=time.time())
    headers = {"X-Request-Id": request.id}
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise WorkloadError(f"{request.id}: HTTP {response.status}: {(await response.text())[:500]}")
            async for event in _events(response):
                if "error" in event:
                    raise WorkloadError(f"{request.id}: {json.dumps(event['error'])[:500]}")
                new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
                if new:
                    result.token_ids += new
                    result.times.append(time.time())
                    result.counts.append(len(new))
                    on_tokens(len(new))
    except aiohttp.ClientError as error:
        raise WorkloadError(f"{request.id}: {type(error).__name__}: {error}") from error
    if len(result.token_ids) != request.max_tokens:
        raise WorkloadError(f"{request.id}: {len(result.token_ids)} tokens came back, not {request.max_tokens}")
    return result


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """The JSON objects of a server-sent event stream, until ``[DONE]``."""
    async for line in response.content:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
