"""The servers behind the proxy: which are up, how busy each is, and which one takes the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

import aiohttp

from pd_integration.proxy.config import ProxyConfig
from pd_integration.proxy.errors import ProxyError

logger = logging.getLogger("pd_integration.proxy")

Side = Literal["prefill", "decode"]
DP_RANK_HEADER = "X-data-parallel-rank"


@dataclass(eq=False)
class Backend:
    """One server. `bootstrap` is set for Prefill only."""

    side: Side
    url: str
    bootstrap: str | None = None
    up: bool = False
    reason: str = "not checked yet"
    """Why it is down; empty when it is up."""
    in_flight: int = 0
    failures: int = 0
    """Failed health checks in a row."""
    turn: int = 0
    """When it last took a request, to break ties between equally loaded ones."""
    chat_parser: bool | None = None
    """Whether its chat route runs a reasoning or tool parser; None: not known."""

    def mark_up(self) -> None:
        if not self.up:
            logger.info("%s %s is up", self.side, self.url)
        self.up, self.reason, self.failures = True, "", 0

    def mark_down(self, reason: str) -> None:
        if self.up:
            logger.warning("%s %s is down: %s", self.side, self.url, reason)
        self.up, self.reason = False, reason
        self.chat_parser = None  # it may come back with other options


@dataclass(eq=False)
class Pool:
    """All servers of one side."""

    side: Side
    backends: Sequence[Backend]
    _turns: int = field(default=0, init=False)

    def available(self, tried: Collection[Backend] = ()) -> list[Backend]:
        """The servers that are up and not in `tried`, at least one.

        Raises:
            ProxyError: 503, there is none; it says why each is out.
        """
        candidates = [backend for backend in self.backends if backend.up and backend not in tried]
        if not candidates:
            reasons = "; ".join(f"{backend.url}: {backend.reason or 'up'}" for backend in self.backends)
            raise ProxyError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"no {self.side} server is available ({reasons})",
                kind="no server available",
                side=self.side,
            )
        return candidates

    @contextmanager
    def lease(self, tried: Collection[Backend]) -> Iterator[Backend]:
        """The least loaded available server, one request busier until the block ends; raises as `available` does."""
        backend = min(self.available(tried), key=lambda b: (b.in_flight, b.turn))
        self._turns += 1
        backend.turn = self._turns
        backend.in_flight += 1
        try:
            yield backend
        finally:
            backend.in_flight -= 1


async def watch(session: aiohttp.ClientSession, backend: Backend, config: ProxyConfig) -> None:
    """Keep `backend.up` current until cancelled."""
    while True:
        await asyncio.sleep(config.health_interval)
        await check(session, backend, config)


async def check(session: aiohttp.ClientSession, backend: Backend, config: ProxyConfig) -> None:
    """One health check: GET /health, and for Prefill its bootstrap server, without which its KV can't be pulled."""
    timeout = aiohttp.ClientTimeout(total=config.health_timeout)
    urls = [f"{backend.url}/health"] + ([f"{backend.bootstrap}/query"] if backend.bootstrap else [])
    try:
        for url in urls:
            async with session.get(url, timeout=timeout, allow_redirects=False) as response:
                await response.read()
                if response.status != HTTPStatus.OK:
                    raise ProxyError(502, "", kind=f"GET {url} answered status {response.status}")
    except aiohttp.ClientConnectorError:
        backend.failures += 1
        backend.mark_down(f"GET {url}: no connection")
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ProxyError) as error:
        backend.failures += 1
        reason = error.kind if isinstance(error, ProxyError) else f"GET {url}: {type(error).__name__}"
        if backend.failures >= config.health_failures or not backend.up:
            backend.mark_down(reason)
    else:
        backend.mark_up()
