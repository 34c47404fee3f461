"""Figures for the operator: collected on both sides, carried by vLLM, exported on its /metrics.

One table says everything about a metric; the stats object that crosses process borders and the Prometheus objects are
both made from it.
"""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from offload_connector._vllm import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
    VllmConfig,
)

PREFIX = "vllm:recompute_offload_"
COPY_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
WAIT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Metric:
    """One exported metric: its Prometheus type, help text, label name if any, and histogram buckets in seconds."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


METRICS = {
    "preempted_offloaded": Metric(Counter, "Preempted requests whose KV cache was stored in host memory."),
    "preempted_restored": Metric(Counter, "Preempted requests whose KV cache was loaded back."),
    "fallback": Metric(Counter, "Preempted requests left to recomputation, by reason.", label="reason"),
    "tokens_restored": Metric(Counter, "Tokens whose KV was loaded back instead of computed again."),
    "blocks_stored": Metric(Counter, "Blocks copied from the device to the host (counted once, not per rank)."),
    "blocks_loaded": Metric(Counter, "Blocks copied from the host to the device (counted once, not per rank)."),
    "bytes_stored": Metric(Counter, "Bytes copied from the device to the host, over all ranks."),
    "bytes_loaded": Metric(Counter, "Bytes copied from the host to the device, over all ranks."),
    "copy_errors": Metric(Counter, "Copy jobs that failed on some rank, by direction.", label="direction"),
    "store_seconds": Metric(Histogram, "Seconds of one store job on one rank.", buckets=COPY_SECONDS),
    "load_seconds": Metric(Histogram, "Seconds of one load job on one rank.", buckets=COPY_SECONDS),
    "resume_seconds": Metric(
        Histogram, "Seconds from the preemption of a saved request to its next token.", buckets=WAIT_SECONDS
    ),
    "host_blocks_total": Metric(Gauge, "Host blocks of the budget."),
    "host_blocks_used": Metric(Gauge, "Host blocks that hold a saved request's KV or are being copied."),
    "host_blocks_cached": Metric(Gauge, "Host blocks kept only for their prefix-cache hash."),
    "host_blocks_free": Metric(Gauge, "Host blocks that hold nothing."),
    "host_blocks_high_water": Metric(Gauge, "The most host blocks used at once."),
    "saved_requests": Metric(Gauge, "Requests whose KV is on the host now."),
}


@dataclass
class OffloadStats(KVConnectorStats):
    """What was counted since it was last taken.

    `data` maps a metric's name to {label value or "": number}, or for a histogram to a list of seconds; only types that
    survive vLLM's serialization.
    """

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        """Raise a counter."""
        values = self.data.setdefault(name, {})
        values[label] = values.get(label, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = {"": value}

    def observe(self, name: str, seconds: float) -> None:
        """Add one observation to a histogram."""
        self.data.setdefault(name, []).append(seconds)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        """Join the figures of another rank, side or step: counters add up, gauges keep the newest."""
        for name, theirs in other.data.items():
            kind = METRICS[name].kind
            if kind is Histogram:
                self.data.setdefault(name, []).extend(theirs)
            elif kind is Gauge:
                self.data[name] = theirs
            else:
                for label, amount in theirs.items():
                    self.add(name, amount, label)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number per metric and label for vLLM's log line; histograms become a mean in seconds."""
        line: dict[str, int | float] = {}
        for name, values in self.data.items():
            if isinstance(values, list):
                line[f"{name} (mean)"] = round(sum(values) / len(values), 6)
            else:
                line.update({f"{name} {label}".strip(): value for label, value in values.items()})
        return line


class OffloadPromMetrics(KVConnectorPromMetrics):
    """The metrics of METRICS as Prometheus objects, one set of label values per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            labels = [*labelnames, metric.label] if metric.label else labelnames
            options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.kind is Gauge:
                # With several API server processes each holds a copy; only the newest is true.
                options["multiprocess_mode"] = "mostrecent"
            self._metrics[name] = metric_types[metric.kind](
                name=PREFIX + name, documentation=metric.help, labelnames=labels, **options
            )
            if not metric.label:
                # A metric that is there from the start, at 0, can be alerted on.
                for values in per_engine_labelvalues.values():
                    self._metrics[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the figures of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            metric, kind = self._metrics[name], METRICS[name].kind
            if kind is Histogram:
                for seconds in values:
                    metric.labels(*engine).observe(seconds)
                continue
            for label, value in values.items():
                child = metric.labels(*engine, label) if METRICS[name].label else metric.labels(*engine)
                if kind is Gauge:
                    child.set(value)
                else:
                    child.inc(value)
