"""What a prefill/decode deployment with the connector must do, wherever it runs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import aiohttp
import pytest
from suite_service import Load, Service, differing, health, wait_for

from pd_integration.workload import Request, Result

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MIN_PREEMPTIONS = 5
SETTLE_S = 60.0


@dataclass
class PressureRun:
    """All requests at once through the proxy, and how far Decode's counters moved meanwhile."""

    requests: list[Request]
    results: list[Result]
    preemptions: float
    figures: dict[str, float]


@pytest.fixture(scope="module")
def pressure(service: Service, load: Load) -> PressureRun:
    requests = load.make("pressure")
    preemptions, figures = service.preemptions(), service.offload()
    results = service.run(service.proxy_url, requests, concurrency=len(requests))
    wait_for_empty_pool(service)
    after = service.offload()
    moved = {name: value - figures.get(name, 0) for name, value in after.items()}
    return PressureRun(requests, results, service.preemptions() - preemptions, moved)


def wait_for_empty_pool(service: Service) -> None:
    """Wait until no host block is in use and no request is saved."""

    def empty() -> bool:
        figures = service.offload()
        return figures["host_blocks_used"] == 0 and figures["saved_requests"] == 0

    wait_for(empty, SETTLE_S, "Decode's host pool to be empty")


def test_the_proxy_sees_both_servers(service: Service) -> None:
    status, detail = health(service.proxy_url)
    assert status == 200
    assert all(server["up"] for side in ("prefill", "decode") for server in detail[side])


def test_without_pressure_outputs_are_prefills_own(
    service: Service, load: Load, reference: dict[str, list[int]]
) -> None:
    before = service.preemptions()
    results = service.run(service.proxy_url, load.make("calm", 4), concurrency=2)
    assert service.preemptions() == before
    assert differing(results, reference) == []


def test_under_pressure_outputs_are_prefills_own(pressure: PressureRun, reference: dict[str, list[int]]) -> None:
    assert pressure.preemptions >= MIN_PREEMPTIONS
    assert differing(pressure.results, reference) == []


def test_every_preempted_request_was_restored_from_the_host(pressure: PressureRun) -> None:
    figures = pressure.figures
    assert figures["preempted_offloaded"] == figures["preempted_restored"] == pressure.preemptions
    assert {name: value for name, value in figures.items() if name.startswith("fallback") and value} == {}
    assert sum(value for name, value in figures.items() if name.startswith("copy_errors")) == 0
    assert figures["blocks_loaded"] > 0
    assert figures["tokens_restored"] > 0


def test_no_token_was_computed_again(service: Service, pressure: PressureRun) -> None:
    if service.trace is None:
        pytest.skip("needs Decode's step trace: start it with PD_INTEGRATION_STEP_TRACE and give --decode-trace")
    seen = service.histories(pressure.requests)
    assert seen.keys() == {request.id for request in pressure.requests}
    assert sum(len(history.preemptions) for history in seen.values()) == pressure.preemptions
    assert {request: history.recomputed for request, history in seen.items() if history.recomputed} == {}


def test_clients_that_leave_give_their_host_blocks_back(
    service: Service, load: Load, reference: dict[str, list[int]]
) -> None:
    asyncio.run(leave_once_saved(service, load.make("leaving")))
    wait_for_empty_pool(service)
    wait_for(lambda: service.metric("vllm:num_requests_running") == 0, SETTLE_S, "Decode to end what was left")
    assert differing(service.run(service.proxy_url, load.make("after", 2), concurrency=2), reference) == []


async def leave_once_saved(service: Service, requests: list[Request]) -> None:
    """Send ``requests``, and break all of them off as soon as one of them is saved on the host."""

    def someone_saved() -> bool:
        return service.offload()["saved_requests"] > 0

    running = asyncio.create_task(stream_all(service, requests))
    try:
        await asyncio.to_thread(wait_for, someone_saved, service.time_out_s, "a request to be saved on the host")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def stream_all(service: Service, requests: list[Request]) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream(request: Request) -> None:
            body = {"model": service.model, "prompt": request.prompt, "max_tokens": request.max_tokens, "stream": True}
            body |= {"temperature": 0, "ignore_eos": True}
            async with session.post(f"{service.proxy_url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for _ in response.content:
                    pass

        await asyncio.gather(*(stream(request) for request in requests))
