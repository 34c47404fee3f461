"""What only an A3 host can show: pinned memory of every card, copies by every rank."""

from __future__ import annotations

import pytest
from suite_service import Load, Service

pytestmark = [pytest.mark.e2e, pytest.mark.a3_only, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def figures(service: Service, load: Load) -> dict[str, float]:
    """Decode's figures since its start, after a load that preempts."""
    requests = load.make("a3")
    service.run(service.proxy_url, requests, concurrency=len(requests))
    figures = service.offload()
    assert figures["blocks_stored"] > 0, "nothing was preempted: give Decode a smaller KV cache with DECODE_BLOCKS"
    return figures


def test_every_rank_stores_and_loads(figures: dict[str, float], ranks: int) -> None:
    for direction in ("store", "load"):
        copies = figures[f"{direction}_seconds_count"]
        assert copies > 0
        assert copies % ranks == 0


def test_every_card_has_its_budget_to_a_block(
    figures: dict[str, float], ranks: int, pytestconfig: pytest.Config
) -> None:
    budget = pytestconfig.getoption("--cpu-bytes-per-rank")
    block_bytes = figures["bytes_stored"] / figures["blocks_stored"] / ranks
    assert budget - block_bytes < figures["host_blocks_total"] * block_bytes <= budget


@pytest.fixture(scope="module")
def ranks(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--ranks")
