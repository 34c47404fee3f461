"""Decode with two data parallel ranks, each with a KV cache and a host pool of its own; alone, and behind a Prefill."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_integration import deployment, models, workload
from pd_integration.deployment import MODEL_NAME, ON, ON_SYNC, Arm, Sizes
from pd_integration.metrics import OFFLOAD_PREFIX
from pd_integration.servers import Server, free_ports
from pd_integration.workload import Result

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RANKS = ("0", "1")
SIZES = Sizes(max_model_len=512, decode_blocks=48)
REQUESTS = workload.make_requests(24, prompt_tokens=75, max_tokens=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of a plain server with room for everybody."""
    with deployment.plain_server(model, tmp_path_factory.mktemp("plain"), SIZES) as server:
        server.wait_healthy()
        return [result.token_ids for result in ask(server)]


def two_ranks(model: Path, run_dir: Path, arm: Arm, alone: bool = False) -> Server:
    server = deployment.decode_server(model, run_dir, SIZES, arm, alone)
    server.command += ["--data-parallel-size", str(len(RANKS))]
    return server


def ask(server: Server, *behind: Server) -> list[Result]:
    def check() -> None:
        for one in (server, *behind):
            one.check_alive()

    return asyncio.run(workload.run(server.url, MODEL_NAME, REQUESTS, len(REQUESTS), check=check))


def figures(server: Server) -> dict[str, dict[str, float]]:
    """vLLM's preemptions and the connector's counters and gauges, by rank."""

    async def read() -> str:
        async with aiohttp.ClientSession() as client, client.get(f"{server.url}/metrics") as response:
            return await response.text()

    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(asyncio.run(read())):
        if family.name == "vllm:num_preemptions" or family.name.startswith(OFFLOAD_PREFIX):
            for sample in family.samples:
                name = sample.name.removeprefix(OFFLOAD_PREFIX)
                if family.type == "counter":
                    name = name.removesuffix("_total")
                found[sample.labels["engine"]][name] += sample.value
    return found


def check_ranks(server: Server) -> None:
    """Every preempted request was restored by the rank that had it, and nothing is left."""
    found = figures(server)
    assert set(found) == set(RANKS)
    for rank in RANKS:
        assert found[rank]["vllm:num_preemptions"] > 0
        assert found[rank]["preempted_offloaded"] == found[rank]["vllm:num_preemptions"]
        assert found[rank]["preempted_restored"] == found[rank]["preempted_offloaded"]
        assert found[rank]["fallback"] == 0
        assert found[rank]["host_blocks_used"] == found[rank]["saved_requests"] == 0
        assert found[rank]["host_blocks_free"] == found[rank]["host_blocks_total"] > 0


@pytest.mark.parametrize("arm", [ON_SYNC, ON], ids=lambda arm: arm.name)
def test_every_rank_keeps_its_own_requests(model: Path, expected: list[list[int]], tmp_path: Path, arm: Arm) -> None:
    with two_ranks(model, tmp_path, arm, alone=True) as server:
        server.wait_healthy()
        assert [result.token_ids for result in ask(server)] == expected
        check_ranks(server)


def test_every_rank_keeps_what_prefill_has_computed(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    (bootstrap_port,) = free_ports(1)
    with (
        deployment.prefill_server(model, tmp_path, SIZES, bootstrap_port) as prefill,
        two_ranks(model, tmp_path, ON) as decode,
    ):
        for server in (prefill, decode):
            server.wait_healthy()
        with deployment.proxy_server(prefill, bootstrap_port, decode, tmp_path) as proxy:
            proxy.wait_healthy()
            assert [result.token_ids for result in ask(proxy, prefill, decode)] == expected
            check_ranks(decode)
