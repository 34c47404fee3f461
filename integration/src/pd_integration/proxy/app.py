"""The proxy's HTTP side: routes, and how a client's request is carried to Prefill and then to Decode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web

from pd_integration.proxy import backends, bodies, resend
from pd_integration.proxy._timeout import timeout
from pd_integration.proxy.answer import Answer
from pd_integration.proxy.backends import Backend, Pool
from pd_integration.proxy.config import ProxyConfig
from pd_integration.proxy.errors import ProxyError, Unreachable, as_event
from pd_integration.proxy.guard import REQUEST_ID, REQUEST_ID_HEADER, SERVERS, guard
from pd_integration.proxy.metrics import Metrics
from pd_integration.proxy.mid_character import held_back, text_given
from pd_integration.proxy.upstream import Call, Prefilled, Upstream, open_session

logger = logging.getLogger("pd_integration.proxy")

T = TypeVar("T")


def create_app(config: ProxyConfig) -> web.Application:
    """The proxy as an aiohttp application; it checks its servers' health from start-up to clean-up.

    Run it with `handler_cancellation=True` (as `start` does): else a client that leaves is not noticed.
    """
    proxy = Proxy(config)
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[guard(proxy.metrics, config)])
    app.cleanup_ctx.append(proxy.connected)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post("/v1/chat/completions", proxy.generate)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/metrics", proxy.render_metrics)
    return app


class Proxy:
    """Two pools of servers and the handlers that use them."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._prefillers = Pool("prefill", [Backend("prefill", p.url, p.bootstrap) for p in config.prefillers])
        self._decoders = Pool("decode", [Backend("decode", url) for url in config.decoders])
        self.metrics = Metrics([self._prefillers, self._decoders])
        self._upstream: Upstream

    async def connected(self, app: web.Application) -> AsyncIterator[None]:
        """From start-up to clean-up: the client session, and one health watch per server."""
        async with open_session(self._config) as session:
            self._upstream = Upstream(session, self._config)
            servers = [*self._prefillers.backends, *self._decoders.backends]
            await asyncio.gather(*(backends.check(session, server, self._config) for server in servers))
            watches = [asyncio.create_task(backends.watch(session, server, self._config)) for server in servers]
            yield
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        limit = self._config.total_timeout
        stream = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                REQUEST_ID_HEADER: request[REQUEST_ID],
            }
        )
        try:
            async with timeout(limit):
                return await self._generate(request, stream)
        except asyncio.TimeoutError:
            message = f"the request did not end within the proxy's total_timeout of {limit:g} s"
            error = ProxyError(HTTPStatus.GATEWAY_TIMEOUT, message, kind="total_timeout ran out")
        except ProxyError as failure:
            error = failure
        if not stream.prepared:
            raise error
        # The status line is out: the error can only be the stream's last event.
        self.metrics.errors.labels(error.side).inc()
        logger.warning("request %s broke off while streaming: %s %s", request[REQUEST_ID], error.side, error.kind)
        await stream.write(as_event(error))
        await stream.write_eof()
        return stream

    async def _generate(self, request: web.Request, stream: web.StreamResponse) -> web.StreamResponse:
        body = bodies.parse(await request.read())
        call = Call(request.path, _passed_on(request))
        answer = Answer(body, chat=call.chat)
        resends = 0
        # No Prefill for a request that Decode can't take: its KV would lie there until the connector's time-out.
        self._decoders.available()
        to_decode = await self._prefill(request, call, body, answer)
        while True:
            await self._decode(request, call, to_decode, answer, stream)
            if not answer.recomputed:
                break
            if resends == self._config.max_resends:
                raise _resent_too_often(resends)
            resends += 1
            self.metrics.resends.inc()
            logger.info("request %s: resend %d, to Prefill again", request[REQUEST_ID], resends)
            answer.next_part()
            to_decode = await self._prefill(request, call, body, answer)
        if not body.get("stream"):
            return web.Response(body=answer.whole(), content_type="application/json")
        await stream.write_eof()
        return stream

    async def _prefill(self, request: web.Request, call: Call, body: bodies.Body, answer: Answer) -> bodies.Body:
        """Have the prompt, and what `answer` holds, computed on a Prefill server; the request for Decode."""
        started = time.monotonic()

        async def first(server: Backend) -> Prefilled:
            return await self._upstream.prefill(server, call, bodies.for_prefill(body, chat=call.chat))

        async def again(server: Backend) -> Prefilled:
            return await self._prefill_again(server, call, body, answer)

        async with AsyncExitStack() as stack:
            # Without a prompt Decode has given it up before the first token, and the client has seen nothing.
            prefilled = await self._reach(self._prefillers, request, stack, again if answer.prompt else first)
        self.metrics.prefill_seconds.observe(time.monotonic() - started)
        if prefilled.transfer is None:
            self.metrics.prefill_kept_nothing.inc()
        if answer.prompt:
            body = resend.again_for_decode(body, answer.prompt, answer.generated, chat=call.chat)
        return bodies.for_decode(body, prefilled.transfer)

    async def _prefill_again(self, server: Backend, call: Call, body: bodies.Body, answer: Answer) -> Prefilled:
        """Have the client's prompt and all that was generated computed on `server`; `answer` learns how it goes on."""

        def detokenize(token_ids: Sequence[int]) -> Awaitable[str]:
            return self._upstream.detokenize(server, call, body.get("model"), token_ids)

        token_ids = [*answer.prompt, *answer.generated]
        to_prefill = resend.again_for_prefill(body, token_ids)
        held = await held_back(token_ids, detokenize) if answer.generated else 0
        if held:
            # Behind half a character a letter brings out the text of the whole prompt, which Decode will repeat.
            to_prefill["allowed_token_ids"] = [await self._upstream.letter(server, call, body.get("model"))]
        prefilled = await self._upstream.prefill(server, replace(call, path="/v1/completions"), to_prefill)
        repeated = ""
        if 0 < held <= len(answer.generated):  # more: the client's own prompt ends so, and nothing has come of it yet
            repeated = await text_given(token_ids[-held:], prefilled.text, detokenize)
        answer.goes_on(repeated, detokenize if held else None)
        return prefilled

    async def _decode(
        self, request: web.Request, call: Call, body: bodies.Body, answer: Answer, stream: web.StreamResponse
    ) -> None:
        """Read one part of `answer` from a Decode server; a stream goes to the client as it comes."""

        async def prepared(server: Backend) -> bodies.Body:
            if not answer.prompt:
                answer.local = await self._why_local(server, call, body)
            return {**body, "return_token_ids": True} if answer.local is None else resend.recompute_locally(body)

        async def whole(server: Backend) -> bodies.Body:
            return await self._upstream.decode(server, call, await prepared(server))

        async def streamed(server: Backend) -> AsyncGenerator[bytes, None]:
            return await stack.enter_async_context(self._upstream.decode_events(server, call, await prepared(server)))

        async with AsyncExitStack() as stack:
            if not body.get("stream"):
                await answer.add(await self._reach(self._decoders, request, stack, whole))
                return
            events = await self._reach(self._decoders, request, stack, streamed)
            if not stream.prepared:
                await stream.prepare(request)
            async for event in answer.events(events):
                await stream.write(event)

    async def _why_local(self, server: Backend, call: Call, body: bodies.Body) -> str | None:
        """Why the request must not be sent to Prefill again once `server` has begun with it; None: it may be."""
        if reason := resend.why_local(body, chat=call.chat):
            return reason
        if not call.chat:
            return None
        if server.chat_parser is None:
            server.chat_parser = await self._upstream.has_chat_parser(server, call, body.get("model"))
        return None if server.chat_parser is False else "a reasoning or tool parser reads the answer as one text"

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models, as a Decode server answers it."""
        async with AsyncExitStack() as stack:
            content = await self._reach(
                self._decoders, request, stack, lambda server: self._upstream.models(server, _passed_on(request))
            )
        return web.Response(body=content, content_type="application/json")

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 when a request could be served now, else 503; the state of every server in both cases."""
        pools = (self._prefillers, self._decoders)
        ready = all(any(server.up for server in pool.backends) for pool in pools)
        detail: dict[str, Any] = {"status": "ok" if ready else "unavailable"}
        for pool in pools:
            detail[pool.side] = [
                {"url": server.url, "up": server.up, "reason": server.reason, "in_flight": server.in_flight}
                for server in pool.backends
            ]
        return web.json_response(detail, status=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def render_metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics, Prometheus text format 0.0.4."""
        return web.Response(body=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _reach(
        self, pool: Pool, request: web.Request, stack: AsyncExitStack, send: Callable[[Backend], Awaitable[T]]
    ) -> T:
        """`send` to the least loaded server of `pool`, or to the next when that one takes no connection.

        The server counts as busy until `stack` is closed.
        """
        tried: list[Backend] = []
        while True:
            with ExitStack() as attempt:
                server = attempt.enter_context(pool.lease(tried))
                request[SERVERS][pool.side] = server.url
                try:
                    result = await send(server)
                except Unreachable as error:
                    server.mark_down(error.kind)
                    tried.append(server)
                else:
                    stack.push(attempt.pop_all())
                    return result


def _passed_on(request: web.Request) -> dict[str, str]:
    """The only headers that go to the servers."""
    headers = {REQUEST_ID_HEADER: request[REQUEST_ID]}
    if "Authorization" in request.headers:
        headers["Authorization"] = request.headers["Authorization"]
    return headers


def _resent_too_often(resends: int) -> ProxyError:
    message = (
        f"the decode servers' KV cache is too full: the request was sent to Prefill again {resends} times, the proxy's "
        "max_resends, and was given up once more; send it later"
    )
    return ProxyError(HTTPStatus.SERVICE_UNAVAILABLE, message, kind="max_resends reached", side="decode")
