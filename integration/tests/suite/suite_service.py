"""The service that the suite talks to, wherever it runs, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from suite_control import Control

from pd_integration import workload
from pd_integration.arms import client_id
from pd_integration.metrics import offload_figures
from pd_integration.trace import History, histories, read_trace
from pd_integration.workload import Request, Result, make_requests

READY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Load:
    """How much the tests send; ``requests`` of them want more KV cache than Decode has."""

    requests: int
    prompt_tokens: int
    output_tokens: int

    def make(self, prefix: str, count: int | None = None) -> list[Request]:
        """The same prompts every time, with ids that begin with ``prefix``."""
        made = make_requests(count or self.requests, self.prompt_tokens, self.output_tokens)
        return [replace(request, id=f"{prefix}-{request.id}") for request in made]


@dataclass(frozen=True)
class Service:
    """Addresses of a running deployment.

    Attributes:
        platform: "local", "docker" or "a3".
        trace: Decode's step trace, None where it can't be read from here.
        control: stops, starts and disturbs the servers; None where the tests may not.
        time_out_s: the proxy's time-out for the first streamed event.
    """

    platform: str
    proxy_url: str
    prefill_url: str
    decode_url: str
    model: str
    load: Load
    time_out_s: float
    trace: Path | None = None
    control: Control | None = field(default=None, compare=False)

    def run(self, url: str, requests: Sequence[Request], concurrency: int) -> list[Result]:
        """Stream ``requests``; raises WorkloadError when one fails."""
        return asyncio.run(workload.run(url, self.model, requests, concurrency, stall_timeout_s=self.time_out_s))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of Decode's samples of ``name`` (as exported, with ``_total``) that have ``labels``."""
        families = text_string_to_metric_families(self._metrics())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def offload(self) -> dict[str, float]:
        """The offload connector's figures on Decode."""
        return offload_figures(self._metrics())

    def preemptions(self) -> float:
        """vLLM's own count of preemptions on Decode."""
        return self.metric("vllm:num_preemptions_total")

    def histories(self, requests: Sequence[Request]) -> dict[str, History]:
        """What Decode's step trace says about ``requests``, by their ids."""
        assert self.trace is not None
        found = histories(read_trace(self.trace))
        wanted = {request.id for request in requests}
        return {client_id(internal): seen for internal, seen in found.items() if client_id(internal) in wanted}

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until both servers are healthy and the proxy says that a request can be served."""
        for url in (self.prefill_url, self.decode_url, self.proxy_url):
            wait_for(lambda url=url: health(url)[0] == 200, timeout_s, f"{url}/health to be 200")

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.decode_url}/metrics", timeout=10) as response:
            return response.read().decode()


def health(url: str) -> tuple[int, dict]:
    """Status and JSON body of ``url``/health; status 0 when nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status, json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
    except OSError:
        return 0, {}


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Ask ``condition`` five times a second until it holds; AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.2)


def differing(results: list[Result], reference: dict[str, list[int]]) -> list[str]:
    """Ids of the results that are not what ``reference`` has for their prompts."""

    def differs(request: Request, token_ids: list[int]) -> bool:
        expected = reference.get(request.prompt)
        return expected is not None and token_ids != expected[: len(token_ids)]

    return [result.request.id for result in results if differs(result.request, result.token_ids)]
