"""The workload client against a fake endpoint: order, concurrency, errors, stalls, latencies."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from pd_integration import workload
from pd_integration.workload import Request, Result, WorkloadError, make_requests

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(handler: Handler, requests: list[Request], concurrency: int = 4, **options) -> list[Result]:
    """The workload against ``handler`` on a port of its own."""

    async def main() -> list[Result]:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            return await workload.run(url, "tiny", requests, concurrency, **options)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


async def stream(request: web.Request, *events: object, end: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    if end:
        await response.write(b"data: [DONE]\n\n")
    return response


def tokens(*ids: int) -> dict:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids)}]}


def test_results_keep_the_order_of_the_requests_and_every_token() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        first = ord(body["prompt"])
        await asyncio.sleep(0.05 if body["prompt"] == "a" else 0)
        return await stream(request, tokens(first), {"choices": []}, tokens(first + 1, first + 2))

    counted: list[int] = []
    results = run(handler, [Request("r0", "a", 3), Request("r1", "b", 3)], on_tokens=counted.append)
    assert [result.token_ids for result in results] == [[97, 98, 99], [98, 99, 100]]
    assert [result.counts for result in results] == [[1, 2], [1, 2]]
    assert sum(counted) == 6


def test_request_carries_its_id_and_asks_for_token_ids() -> None:
    seen: list[tuple[str, dict]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers["X-Request-Id"], await request.json()))
        return await stream(request, tokens(1))

    run(handler, [Request("r7", "hello", 1)])
    [(request_id, body)] = seen
    assert request_id == "r7"
    assert body["return_token_ids"] is True
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True


def test_no_more_than_the_given_number_at_once() -> None:
    running = most = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await stream(request, tokens(1))

    run(handler, [Request(f"r{n}", "x", 1) for n in range(12)], concurrency=3)
    assert most == 3


def test_http_error_names_the_request_and_the_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no Decode server"}}, status=503)

    with pytest.raises(WorkloadError, match=r"r0: HTTP 503: .*no Decode server"):
        run(handler, [Request("r0", "x", 1)])


def test_error_event_in_a_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, tokens(1), {"error": {"message": "transfer failed"}})

    with pytest.raises(WorkloadError, match=r"r0: .*transfer failed"):
        run(handler, [Request("r0", "x", 2)])


def test_stream_that_ends_early() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, tokens(1, 2))

    with pytest.raises(WorkloadError, match="r0: 2 tokens came back, not 5"):
        run(handler, [Request("r0", "x", 5)])


def test_broken_connection() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await stream(request, tokens(1), end=False)
        request.transport.abort()
        return response

    with pytest.raises(WorkloadError, match="r0: Client"):
        run(handler, [Request("r0", "x", 2)])


def test_silence_of_all_requests_is_a_stall() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(WorkloadError, match="no request got a token for 1 s"):
        run(handler, [Request("r0", "x", 2)], stall_timeout_s=0.9)


def test_one_slow_request_is_no_stall() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.headers["X-Request-Id"] == "slow":
            await asyncio.sleep(2.2)
        else:
            await asyncio.sleep(0.3)
        return await stream(request, tokens(1))

    requests = [Request("slow", "x", 1)] + [Request(f"r{n}", "x", 1) for n in range(8)]
    assert len(run(handler, requests, concurrency=2, stall_timeout_s=1.5)) == 9


def test_failed_check_ends_the_workload() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    def check() -> None:
        raise RuntimeError("decode died")

    with pytest.raises(RuntimeError, match="decode died"):
        run(handler, [Request("r0", "x", 2)], check=check)


def test_requests_are_the_same_for_a_seed_and_differ_from_each_other() -> None:
    requests = make_requests(32, 400, 700)
    assert requests == make_requests(32, 400, 700)
    assert requests != make_requests(32, 400, 700, seed=1)
    assert len({request.prompt for request in requests}) == 32
    assert all(350 <= len(request.prompt) <= 450 for request in requests)


def test_latency_is_the_time_since_the_arrival_before_shared_by_the_tokens_of_one_arrival() -> None:
    result = Result(Request("r0", "x", 6), times=[10.0, 11.0, 13.0, 13.0004], counts=[1, 1, 1, 3])
    assert result.latencies == pytest.approx([1.0, 0.5, 0.5, 0.5, 0.5])
