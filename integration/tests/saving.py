"""Waiting for the moment in which a server has saved requests."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from pd_integration.metrics import read_offload_figures
from pd_integration.servers import Server


async def wait_until_saved(
    session: aiohttp.ClientSession, server: Server, work: asyncio.Task[object], timeout_s: float
) -> None:
    """Wait until the KV of some request is on the host of `server`, while `work` sends it requests."""
    deadline = time.monotonic() + timeout_s
    while not (await read_offload_figures(session, server.url)).get("saved_requests"):
        assert not work.done(), work
        assert time.monotonic() < deadline, "nothing was saved"
        await asyncio.sleep(0.05)
