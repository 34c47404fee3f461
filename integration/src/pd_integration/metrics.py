"""Figures that a Decode server exports on /metrics: the connector's, read while it runs and at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

OFFLOAD_PREFIX = "vllm:recompute_offload_"
SAMPLE_INTERVAL_S = 0.5
_VLLM_LABELS = {"model_name", "engine"}


def offload_figures(text: str) -> dict[str, float]:
    """The connector's metrics in a Prometheus ``text``: name, without prefix and a counter's ``_total``, to value.

    A metric's own label is put behind its name, as in ``fallback:no_room``. Histograms give ``_sum`` and ``_count``.
    """
    figures: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(OFFLOAD_PREFIX):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            name = sample.name.removeprefix(OFFLOAD_PREFIX)
            if family.type == "counter":
                name = name.removesuffix("_total")
            key = ":".join([name, *(value for label, value in sample.labels.items() if label not in _VLLM_LABELS)])
            figures[key] = figures.get(key, 0.0) + sample.value
    return figures


@dataclass(frozen=True)
class HostSample:
    """Use of the host pool at time ``t`` (seconds since the epoch), in blocks."""

    t: float
    used: float
    total: float


async def read_offload_figures(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """`offload_figures` of the server at ``url`` now; empty if it runs without the connector."""
    async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=10)) as response:
        response.raise_for_status()
        return offload_figures(await response.text())


@asynccontextmanager
async def sampled_host_use(url: str) -> AsyncIterator[list[HostSample]]:
    """Sample the host pool of the server at ``url`` into the list it yields, until the block ends."""
    samples: list[HostSample] = []

    async def sample(session: aiohttp.ClientSession) -> None:
        while True:
            figures = await read_offload_figures(session, url)
            if "host_blocks_used" in figures:
                samples.append(HostSample(time.time(), figures["host_blocks_used"], figures["host_blocks_total"]))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(sample(session))
        try:
            yield samples
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
