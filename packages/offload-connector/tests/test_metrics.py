"""Figures: joined over ranks and steps, and exported."""

import json

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from offload_connector.metrics import METRICS, PREFIX, OffloadPromMetrics, OffloadStats


@pytest.fixture
def exported():
    """(prometheus object, function that returns its samples by name and labels)."""
    registry = CollectorRegistry()

    def make(cls):
        return lambda *args, **kwargs: cls(*args, registry=registry, **kwargs)

    class Config:
        kv_transfer_config = None

    types = {cls: make(cls) for cls in (Counter, Gauge, Histogram)}
    prom = OffloadPromMetrics(Config, types, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})

    def samples():
        generate_latest(registry)
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for metric in registry.collect()
            for sample in metric.samples
        }

    return prom, samples


def stats(**counters):
    made = OffloadStats()
    for name, amount in counters.items():
        made.add(name, amount)
    return made


def test_counters_add_up_and_gauges_keep_the_newest():
    first, second = stats(blocks_stored=3), stats(blocks_stored=4, bytes_stored=10)
    first.set("host_blocks_used", 9)
    second.set("host_blocks_used", 2)
    first.aggregate(second)
    assert first.data == {"blocks_stored": {"": 7}, "bytes_stored": {"": 10}, "host_blocks_used": {"": 2}}


def test_labels_stay_apart_and_observations_are_all_kept():
    first, second = OffloadStats(), OffloadStats()
    first.add("fallback", label="host_full")
    second.add("fallback", label="copy_failed")
    first.observe("load_seconds", 0.5)
    second.observe("load_seconds", 1.5)
    first.aggregate(second)
    assert first.data["fallback"] == {"host_full": 1, "copy_failed": 1}
    assert first.reduce() == {"fallback host_full": 1, "fallback copy_failed": 1, "load_seconds (mean)": 1.0}


def test_they_survive_serialization():
    made = stats(blocks_stored=3)
    made.observe("store_seconds", 0.25)
    assert OffloadStats(data=json.loads(json.dumps(made.data))).data == made.data


def test_empty_and_reset():
    made = OffloadStats()
    assert made.is_empty()
    made.add("blocks_stored")
    assert not made.is_empty()
    made.reset()
    assert made.is_empty()


def test_every_engine_is_exported_under_its_own_labels(exported):
    prom, samples = exported
    prom.observe(stats(preempted_offloaded=2).data, 0)
    prom.observe(stats(preempted_offloaded=5).data, 1)
    prom.observe(stats(preempted_offloaded=1).data, 0)
    of = {
        labels[0][1]: value
        for (name, *labels), value in samples().items()
        if name == f"{PREFIX}preempted_offloaded_total"
    }
    assert of == {"0": 3.0, "1": 5.0}


def test_kinds_are_exported_as_what_they_are(exported):
    prom, samples = exported
    made = OffloadStats()
    made.add("fallback", label="host_full")
    made.set("host_blocks_used", 7)
    made.observe("resume_seconds", 0.2)
    prom.observe(made.data)
    found = {
        (name, dict(labels).get("reason")): v
        for (name, *labels), v in samples().items()
        if dict(labels)["engine"] == "0"
    }
    assert found[f"{PREFIX}fallback_total", "host_full"] == 1
    assert found[f"{PREFIX}host_blocks_used", None] == 7
    assert found[f"{PREFIX}resume_seconds_count", None] == 1
    assert found[f"{PREFIX}resume_seconds_sum", None] == 0.2


def test_metrics_without_a_label_are_there_from_the_start(exported):
    _, samples = exported
    names = {name for name, *_ in samples()}
    for name, metric in METRICS.items():
        suffix = {Counter: "_total", Gauge: "", Histogram: "_count"}[metric.kind]
        assert (PREFIX + name + suffix in names) == (metric.label is None)
