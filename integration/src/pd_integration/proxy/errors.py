"""Errors as the client sees them: an HTTP status and an OpenAI-style body, or one SSE event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from http.client import responses
from typing import Any

SIDE_HEADER = "X-PD-Error-Side"
"""Response header that names the side an error came from: `prefill`, `decode` or `proxy`."""

_MAX_QUOTED_CHARS = 500


class ProxyError(Exception):
    """A request failed and `body` says why to the client.

    `kind` is the only text fit for a log: a body may quote the prompt (vLLM's validation errors do).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        side: str = "proxy",
        param: str | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(kind)
        self.status = status
        self.kind = kind
        self.side = side
        self.headers = dict(headers or {})
        self.body = body if body is not None else error_body(status, message, param)


class Unreachable(ProxyError):
    """No connection to this server, nothing was sent: another one may be tried."""


def bad_request(message: str, param: str | None = None) -> ProxyError:
    """The client's request can't be served as it is; `param` names the field."""
    return ProxyError(HTTPStatus.BAD_REQUEST, message, kind="bad request", param=param)


def bad_upstream(side: str, why: str) -> ProxyError:
    """A server answered, or broke off, in a way that nothing can be made of. `why` is fit for a log."""
    return ProxyError(HTTPStatus.BAD_GATEWAY, f"the {side} server failed: {why}", kind=why, side=side)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object in the form vLLM uses it (`code` is the HTTP status)."""
    kind = responses.get(status, "").replace(" ", "") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def from_upstream(side: str, status: int, content: bytes, headers: Mapping[str, str]) -> ProxyError:
    """The error that an upstream server answered, status and OpenAI-style body kept."""
    kept = {"Retry-After": headers["Retry-After"]} if "Retry-After" in headers else {}
    if status < HTTPStatus.BAD_REQUEST:  # a redirect, say: nothing the client could use
        message = f"the {side} server answered status {status}, which the proxy does not follow"
        return ProxyError(HTTPStatus.BAD_GATEWAY, message, kind=f"answered status {status}", side=side)
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    kind = f"answered status {status}"
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return ProxyError(status, "", kind=kind, side=side, body=_with_reason(side, status, body), headers=kept)
    # FastAPI and vLLM's key check say it in one string.
    said = (body.get("error") or body.get("detail")) if isinstance(body, dict) else None
    quoted = said if isinstance(said, str) else content.decode("utf-8", errors="replace")
    message = f"the {side} server answered status {status}: {quoted[:_MAX_QUOTED_CHARS]}"
    return ProxyError(status, message, kind=kind, side=side, headers=kept)


def error_from_event(side: str, error: Mapping[str, Any]) -> ProxyError:
    """The error that an upstream stream began with; its `code` is the HTTP status that it would have had."""
    code = error.get("code")
    status = code if type(code) is int and 400 <= code <= 599 else int(HTTPStatus.BAD_GATEWAY)
    body = _with_reason(side, status, {"error": dict(error)})
    return ProxyError(status, "", kind=f"its stream began with error {status}", side=side, body=body)


def _with_reason(side: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body as it is, unless its error says nothing: vLLM's does when the KV of a request could not be fetched."""
    if body["error"].get("message"):
        return body
    reason = f"the {side} server answered status {status} and gave no reason; its log has it"
    return {**body, "error": {**body["error"], "message": reason}}


def as_event(error: ProxyError) -> bytes:
    """The error as the last events of a stream, as vLLM ends one: an error object, then [DONE]."""
    return b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"
