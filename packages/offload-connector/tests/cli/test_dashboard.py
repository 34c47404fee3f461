"""The Grafana dashboard shows exactly the metrics that are exported, with labels that they have."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from offload_connector.metrics import METRICS, PREFIX, OffloadPromMetrics

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "recompute-offload.json"
LABELS = ["model_name", "engine"]  # vLLM's own


@pytest.fixture(scope="module")
def exported():
    """Every sample that the Prometheus objects export once something was counted: its name and its labels."""
    registry = CollectorRegistry()
    types = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = OffloadPromMetrics(SimpleNamespace(kv_transfer_config=None), types, LABELS, {0: ["model", "0"]})
    metrics.observe(
        {
            name: [0.1] if metric.kind is Histogram else {"some" if metric.label else "": 1}
            for name, metric in METRICS.items()
        }
    )
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def expressions(dashboard):
    variables = [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    return variables + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def used(expression):
    """(metric, labels of its selector) of every metric in a PromQL expression."""
    found = re.findall(rf"({re.escape(PREFIX)}\w+)(?:\{{([^}}]*)\}})?", expression)
    return [(name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) for name, selector in found]


def test_every_metric_in_the_dashboard_is_exported_with_its_labels(expressions, exported):
    for expression in expressions:
        assert used(expression), expression
        for name, labels in used(expression):
            assert name in exported, expression
            assert set(labels) <= exported[name], expression


def test_every_grouping_label_belongs_to_the_metric(expressions, exported):
    for expression in expressions:
        for labels, argument in re.findall(r"by \(([^)]*)\) \(([^)]*)\)", expression):
            for name, _ in used(argument):
                assert set(re.split(r",\s*", labels)) <= exported[name], expression


def test_every_legend_label_is_one_that_the_expression_keeps(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \({label}\)", target["expr"]), target


def test_every_exported_metric_is_shown(expressions):
    shown = {name for expression in expressions for name, _ in used(expression)}
    for name, metric in METRICS.items():
        suffixes = {Counter: ["_total"], Gauge: [""], Histogram: ["_bucket", "_sum", "_count"]}[metric.kind]
        for suffix in suffixes:
            assert f"{PREFIX}{name}{suffix}" in shown


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_parentheses_balance(expressions):
    for expression in expressions:
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("{") == expression.count("}"), expression
