"""A server is put to sleep while requests are saved, and woken: vLLM pauses, clears its caches and goes on.

vLLM's CPU platform keeps the memory all the same; what the scheduler and the connectors have to do is done.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from saving import wait_until_saved

from pd_integration import deployment, models, workload
from pd_integration.deployment import MODEL_NAME, ON, ON_SYNC, Arm, Sizes
from pd_integration.metrics import read_offload_figures
from pd_integration.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SIZES = Sizes(max_model_len=512, decode_blocks=48)
REQUESTS = workload.make_requests(12, prompt_tokens=75, max_tokens=200)
WAIT_SECONDS = 60.0


def decode(model: Path, run_dir: Path, arm: Arm) -> Server:
    """Decode without another connector, with the end points that put it to sleep."""
    server = deployment.decode_server(model, run_dir, SIZES, arm, alone=True)
    server.environment["VLLM_SERVER_DEV_MODE"] = "1"
    return server


async def sleep_in_between(server: Server) -> list[list[int]]:
    """Send all requests, sleep when one is saved, wake up; return the tokens."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_SECONDS)) as session:
        work = asyncio.create_task(
            workload.run(server.url, MODEL_NAME, REQUESTS, len(REQUESTS), check=server.check_alive)
        )
        await wait_until_saved(session, server, work, WAIT_SECONDS)
        async with session.post(f"{server.url}/sleep?level=1&mode=keep") as response:
            assert response.status == 200, await response.text()
        async with session.get(f"{server.url}/is_sleeping") as response:
            assert (await response.json())["is_sleeping"]
        assert not work.done()
        async with session.post(f"{server.url}/wake_up") as response:
            assert response.status == 200, await response.text()
        return [result.token_ids for result in await work]


@pytest.mark.parametrize("arm", [ON_SYNC, ON], ids=lambda arm: arm.name)
def test_requests_go_on_after_a_sleep(tmp_path: Path, arm: Arm) -> None:
    model = models.write_model(tmp_path / "model")
    with decode(model, tmp_path, arm) as server:
        server.wait_healthy()
        slept = asyncio.run(sleep_in_between(server))
        figures = asyncio.run(final_figures(server))
    with deployment.plain_server(model, tmp_path, SIZES) as plain:
        plain.wait_healthy()
        results = asyncio.run(workload.run(plain.url, MODEL_NAME, REQUESTS, len(REQUESTS), check=plain.check_alive))
    assert slept == [result.token_ids for result in results]
    # What was saved before the sleep is gone: it could belong to other weights.
    assert figures["preempted_restored"] < figures["preempted_offloaded"]
    assert figures["host_blocks_used"] == figures["saved_requests"] == 0


async def final_figures(server: Server) -> dict[str, float]:
    async with aiohttp.ClientSession() as session:
        return await read_offload_figures(session, server.url)
