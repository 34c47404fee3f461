"""Fake Prefill (with its bootstrap) and Decode servers, in-process on 127.0.0.1, that record what the proxy sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from pd_integration.proxy import Prefiller, ProxyConfig, start

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

TIMEOUTS = {
    "connect_timeout": 2.0,
    "prefill_timeout": 5.0,
    "first_byte_timeout": 5.0,
    "idle_timeout": 5.0,
    "total_timeout": 10.0,
    "health_interval": 0.05,
    "health_timeout": 2.0,
    "shutdown_timeout": 5.0,
}


@dataclass
class Received:
    path: str
    headers: CIMultiDictProxy[str]
    body: dict[str, Any]


class FakeServer:
    """Answers like a vLLM API server; a test replaces `answer` for other behaviour."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.received: list[Received] = []
        self.asides: list[Received] = []
        """The proxy's own small questions."""
        self.aside_status = 200
        self.chat_parser = False
        self.running = 0
        self.cancelled = 0
        self.health_status = 200
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/completions", self._handle)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/tokenize", self._aside)
        app.router.add_post("/detokenize", self._aside)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/query", self._query)
        # In the tests' logs the fake servers must not speak: what is scanned there is the proxy's.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = _url(self._runner)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers["X-Request-Id"].endswith("-aside"):
            return await self._aside(request)
        body = await request.json()
        self.received.append(Received(request.path, request.headers, body))
        self.running += 1
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _aside(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asides.append(Received(request.path, request.headers, body))
        if self.aside_status != 200:
            return web.json_response({"error": {"message": "no", "code": self.aside_status}}, status=self.aside_status)
        if "tools" in body and not self.chat_parser:
            return web.json_response({"error": {"message": "requires --tool-call-parser", "code": 400}}, status=400)
        return web.json_response({"choices": [], "usage": {"completion_tokens": 1, "completion_tokens_details": None}})

    async def _models(self, request: web.Request) -> web.Response:
        self.received.append(Received(request.path, request.headers, {}))
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _query(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound


class FakePrefill(FakeServer):
    """Also its own bootstrap server; `engines` maps data-parallel ranks to engine ids."""

    def __init__(self, answer: Answer | None = None) -> None:
        super().__init__(answer or prefill_answer("length"))
        self.engines: dict[str, str] = {"0": "engine-a"}
        self.query: Any = None
        self.query_status = 200

    async def _query(self, request: web.Request) -> web.Response:
        engines = {rank: {"engine_id": engine, "worker_addr": {}} for rank, engine in self.engines.items()}
        return web.json_response(engines if self.query is None else self.query, status=self.query_status)


def prefill_answer(finish_reason: str) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"id": "p", "choices": [{"index": 0, "text": "?", "finish_reason": finish_reason}]})

    return answer


def decode_answer(texts: tuple[str, ...] = ("Hel", "lo"), pause: float = 0.0) -> Answer:
    """A whole answer or a stream, as the request asks."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            await asyncio.sleep(pause)
            choice = {"index": 0, "text": "".join(texts), "finish_reason": "length"}
            return web.json_response({"id": "d", "choices": [choice]})
        of_route = chat_event if "chat" in request.path else event
        return await stream(request, [of_route(text) for text in texts] + [b"data: [DONE]\n\n"], pause)

    return answer


def error_answer(status: int, body: Any, headers: dict[str, str] | None = None) -> Answer:
    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        if isinstance(body, str):
            return web.Response(text=body, status=status, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    return answer


async def hang(*_: Any) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody cancelled this request")


async def drop(request: web.Request, *_: Any) -> web.StreamResponse:
    """The server dies: the connection closes without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def stream_then(
    chunks: list[bytes], after: Callable[[web.Request, web.StreamResponse], Awaitable[Any]] | None
) -> Answer:
    """Stream `chunks`, then do `after`, or end the stream in good order."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, chunks, end=after is None)
        return response if after is None else await after(request, response)

    return answer


async def stream(request: web.Request, chunks: list[bytes], pause: float = 0.0, end: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(pause)
    if end:
        await response.write_eof()
    return response


def event(text: str) -> bytes:
    return sse({"choices": [{"index": 0, "text": text}]})


def chat_event(text: str) -> bytes:
    return sse({"choices": [{"index": 0, "delta": {"content": text}}]})


def sse(data: Any) -> bytes:
    """An event as vLLM writes it: JSON without spaces, characters as they are."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Pair:
    """A proxy in front of fake servers, and a client to talk to it."""

    prefill: list[FakePrefill]
    decode: list[FakeServer]
    client: aiohttp.ClientSession
    url: str
    config: ProxyConfig
    runner: web.AppRunner

    def post(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> Any:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        return self.client.post(self.url + path, data=body, **kwargs)

    async def ask(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> tuple[int, dict[str, Any]]:
        async with self.post(body, path, **kwargs) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str, **kwargs: Any) -> tuple[int, bytes]:
        async with self.client.get(self.url + path, **kwargs) as response:
            return response.status, await response.read()

    async def read_stream(self, body: Any, path: str = "/v1/completions") -> bytes:
        async with self.post({**body, "stream": True}, path) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return await response.read()

    def servers(self) -> Iterator[FakeServer]:
        yield from self.prefill
        yield from self.decode


@asynccontextmanager
async def pair(
    prefill: list[FakePrefill] | None = None,
    decode: list[FakeServer] | None = None,
    bootstrap: bool = True,
    **settings: Any,
) -> AsyncIterator[Pair]:
    """By default one Prefill and one Decode server that answer well; `bootstrap`: the proxy asks Prefill's."""
    prefills = prefill or [FakePrefill()]
    decodes = decode or [FakeServer(decode_answer())]
    for server in [*prefills, *decodes]:
        await server.start()
    config = ProxyConfig(
        prefillers=tuple(Prefiller(p.url, p.url if bootstrap else None) for p in prefills),
        decoders=tuple(d.url for d in decodes),
        port=0,
        **{**TIMEOUTS, **settings},
    )
    runner = await start(config)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
            yield Pair(prefills, decodes, client, _url(runner), config, runner)
    finally:
        await runner.cleanup()
        for server in [*prefills, *decodes]:
            await server.stop()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for `condition`; AssertionError when it does not come true in time."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"
