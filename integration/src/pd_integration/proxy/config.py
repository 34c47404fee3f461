"""What the proxy is told at start, checked before anything listens."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from urllib.parse import urlsplit


class ConfigError(ValueError):
    """A setting is unusable; the message names it, its value and the fix."""


@dataclass(frozen=True)
class Prefiller:
    """A Prefill server, and how Decode learns where its KV is.

    `bootstrap` is the Mooncake bootstrap server that runs in it (vLLM's MooncakeConnector); Decode servers connect to
    it too, so it must be an address they can reach. None: Prefill's answers carry `kv_transfer_params` that say where
    the KV is (vllm-ascend's MooncakeConnectorV1, NixlConnector).
    """

    url: str
    bootstrap: str | None = None


@dataclass(frozen=True)
class ProxyConfig:
    """Settings of one proxy; every time is in seconds."""

    prefillers: tuple[Prefiller, ...]
    decoders: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 32 * 1024 * 1024
    connect_timeout: float = 5.0
    """To open a connection to a server; then the next server is tried."""
    prefill_timeout: float = 300.0
    """Prefill's whole answer, its queue included."""
    first_byte_timeout: float = 300.0
    """Decode's first streamed event: its queue and the KV transfer included."""
    idle_timeout: float = 300.0
    """Between two streamed events. A preempted request may be silent for long."""
    total_timeout: float = 3600.0
    """The whole request, from the body read to the last byte sent."""
    aside_timeout: float = 30.0
    """A small question to a server: the text of a few tokens, what its chat route does."""
    max_resends: int = 8
    """How often one request may be sent to Prefill again after Decode gave it up."""
    health_interval: float = 2.0
    health_timeout: float = 5.0
    health_failures: int = 2
    """Failed checks in a row until a server counts as down. A refused connection counts at once."""
    shutdown_timeout: float = 30.0
    """How long requests in flight may go on after SIGTERM or SIGINT."""

    def __post_init__(self) -> None:
        if not self.prefillers:
            raise ConfigError("no Prefill server given; add --prefill URL --prefill-bootstrap URL")
        if not self.decoders:
            raise ConfigError("no Decode server given; add --decode URL")
        # A trailing slash would double in every path we append, also in the bootstrap address that Decode uses.
        prefillers = tuple(
            Prefiller(
                _base_url("prefill", p.url),
                None if p.bootstrap is None else _base_url("prefill-bootstrap", p.bootstrap),
            )
            for p in self.prefillers
        )
        decoders = tuple(_base_url("decode", url) for url in self.decoders)
        object.__setattr__(self, "prefillers", prefillers)
        object.__setattr__(self, "decoders", decoders)
        for name, urls in (
            ("prefill", [p.url for p in prefillers]),
            ("prefill-bootstrap", [p.bootstrap for p in prefillers if p.bootstrap is not None]),
            ("decode", list(decoders)),
        ):
            twice = sorted({url for url in urls if urls.count(url) > 1})
            if twice:
                raise ConfigError(f"{name} {twice[0]} is given more than once; give every server one time")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 1 to 65535, or 0 for any free port")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("max_body_bytes", "health_failures") and value < 1:
                raise ConfigError(f"{field.name} is {value}; give 1 or more")
            if field.name == "max_resends" and value < 0:
                raise ConfigError(f"max_resends is {value}; give 0 or more")
            if field.type == "float" and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field.name} is {value}; give a number of seconds above 0")


def _base_url(name: str, url: str) -> str:
    """`url` without a trailing slash; ConfigError unless it is plain http(s)://host[:port][/path]."""
    hint = f"{name} {url!r} is not a server address; write it like http://127.0.0.1:8100"
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"{hint} ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise ConfigError(hint)
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{hint}, without user, query or fragment")
    return url.rstrip("/")
