"""Around every handler: a request id, errors as JSON, counters, one log line. Nothing here logs what clients sent."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
import uuid
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pd_integration.proxy.config import ProxyConfig
from pd_integration.proxy.errors import SIDE_HEADER, ProxyError
from pd_integration.proxy.metrics import Metrics

logger = logging.getLogger("pd_integration.proxy")

REQUEST_ID = web.RequestKey("request_id", str)
SERVERS = web.RequestKey("servers", dict[str, str])
"""The server of each side that took the request last, for the log."""
REQUEST_ID_HEADER = "X-Request-Id"
# The id goes into logs, ours and vLLM's: a client may not put text there.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def guard(metrics: Metrics, config: ProxyConfig) -> Middleware:
    """The middleware; it is the outermost one."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.monotonic()
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        request[SERVERS] = {}
        # The path of an unknown route is the client's text.
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "unknown"
        try:
            response = await _answer(request, handler, metrics, config)
        except (asyncio.CancelledError, ConnectionResetError):
            metrics.disconnects.inc()
            logger.info("%s %s: client gone after %.3f s", _describe(request), route, time.monotonic() - started)
            # A write to a client that has just left: for aiohttp a handler's error unless it ends as a cancellation.
            raise asyncio.CancelledError from None
        metrics.requests.labels(route, response.status).inc()
        logger.log(
            logging.DEBUG if request.method == "GET" else logging.INFO,
            "%s %s: status %d in %.3f s",
            _describe(request),
            route,
            response.status,
            time.monotonic() - started,
        )
        return response

    return middleware


async def _answer(request: web.Request, handler: Handler, metrics: Metrics, config: ProxyConfig) -> web.StreamResponse:
    try:
        response = await handler(request)
    except ProxyError as failure:
        error = failure
    except web.HTTPException as failure:
        error = _of_http(failure, config)
    except ConnectionResetError:
        raise
    except Exception as failure:
        # Not the message, not the values: either may quote the prompt.
        frames = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(traceback.extract_tb(failure.__traceback__)))
        logger.error("%s failed: %s at %s", _describe(request), type(failure).__name__, frames)
        error = ProxyError(500, "internal error of the proxy", kind="internal error")
    else:
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
        return response
    metrics.errors.labels(error.side).inc()
    if error.side != "proxy":
        logger.warning("%s: %s %s", _describe(request), error.side, error.kind)
    headers = {**error.headers, SIDE_HEADER: error.side, REQUEST_ID_HEADER: request[REQUEST_ID]}
    return web.json_response(error.body, status=error.status, headers=headers)


def _of_http(failure: web.HTTPException, config: ProxyConfig) -> ProxyError:
    if isinstance(failure, web.HTTPRequestEntityTooLarge):
        message = f"the request body is larger than the proxy's limit, max_body_bytes={config.max_body_bytes}"
    elif isinstance(failure, web.HTTPMethodNotAllowed):
        message = f"this route takes {', '.join(sorted(failure.allowed_methods))}"
    elif failure.status == HTTPStatus.NOT_FOUND:
        message = "no such route; the proxy serves /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics"
    else:
        message = failure.reason
    headers = {"Allow": failure.headers["Allow"]} if "Allow" in failure.headers else {}
    return ProxyError(failure.status, message, kind="refused", headers=headers)


def _describe(request: web.Request) -> str:
    servers = "".join(f" {side}={url}" for side, url in request[SERVERS].items())
    return f"request {request[REQUEST_ID]}{servers}"
