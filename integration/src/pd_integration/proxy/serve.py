"""Listening: start the proxy on its address, run it until a signal, end it gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal

from aiohttp import web

from pd_integration.proxy.app import create_app
from pd_integration.proxy.config import ProxyConfig

logger = logging.getLogger("pd_integration.proxy")


async def start(config: ProxyConfig) -> web.AppRunner:
    """Listen on `config.host` and `config.port`, with the first health checks done.

    `runner.addresses` holds what was bound (for port 0). `await runner.cleanup()` ends it: it stops listening, lets
    requests in flight go on for `config.shutdown_timeout` seconds, then cancels them.

    Raises:
        OSError: the address can't be bound.
    """
    runner = web.AppRunner(
        create_app(config),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.shutdown_timeout,
        logger=_http_logger(),
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, config.host, config.port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def run(config: ProxyConfig) -> None:
    """Serve until SIGINT or SIGTERM, then end gracefully. A second signal ends the process at once."""
    asyncio.run(_run(config))


async def _run(config: ProxyConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    runner = await start(config)
    for host, port, *_ in runner.addresses:
        logger.info("listening on http://%s:%d", host, port)
    await stop.wait()
    for number in signals:
        loop.remove_signal_handler(number)
    logger.info("stopping; requests in flight have %g s", config.shutdown_timeout)
    await runner.cleanup()


def _http_logger() -> logging.Logger:
    """aiohttp's own log without tracebacks: that of a malformed request quotes the client's bytes."""
    http_logger = logging.getLogger("pd_integration.proxy.http")
    http_logger.addFilter(_without_traceback)
    return http_logger


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[0] is not None:
        record.msg = f"{record.getMessage()}: {record.exc_info[0].__name__}"
        record.args = None
        record.exc_info = record.exc_text = None
    return True
