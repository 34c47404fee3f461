"""What the proxy counts, in Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pd_integration.proxy.backends import Pool


class Metrics:
    """Counters of one proxy, in a registry of their own: two proxies in one process don't mix."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(tuple(pools)))
        self.requests = Counter(
            "pd_proxy_requests", "Requests answered, by route and status.", ["route", "status"], registry=self._registry
        )
        self.errors = Counter(
            "pd_proxy_errors", "Requests that failed, by the side that failed.", ["side"], registry=self._registry
        )
        self.disconnects = Counter(
            "pd_proxy_client_disconnects", "Requests whose client left before the end.", registry=self._registry
        )
        self.prefill_kept_nothing = Counter(
            "pd_proxy_prefill_kept_nothing",
            "Prefills that ended by a stop token and kept no KV: Decode computed the prompt.",
            registry=self._registry,
        )
        self.resends = Counter(
            "pd_proxy_resends",
            "Times that a request was sent to Prefill again because Decode had given it up.",
            registry=self._registry,
        )
        self.prefill_seconds = Histogram(
            "pd_proxy_prefill_seconds", "Time until Prefill had answered.", registry=self._registry
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """The pools' own state, read when it is asked for."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = GaugeMetricFamily("pd_proxy_backend_up", "1 when the server passes its health checks.", labels=_LABELS)
        busy = GaugeMetricFamily("pd_proxy_backend_in_flight", "Requests the server works on now.", labels=_LABELS)
        for pool in self._pools:
            for backend in pool.backends:
                up.add_metric([backend.side, backend.url], float(backend.up))
                busy.add_metric([backend.side, backend.url], float(backend.in_flight))
        return [up, busy]


_LABELS = ("side", "server")
