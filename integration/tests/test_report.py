"""demo.json and demo.html from a synthetic outcome."""

import json
import re
from pathlib import Path

import pytest

from pd_integration import report
from pd_integration.arms import ArmRun
from pd_integration.demo import Outcome, Settings
from pd_integration.deployment import OFF, ON
from pd_integration.metrics import HostSample
from pd_integration.trace import LANE_KINDS, Step
from pd_integration.workload import Request, Result


@pytest.fixture
def outcome() -> Outcome:
    name = "</script>"
    results = [Result(Request(name, "x", 2), 100.0, [1, 2], [101.0, 104.0], [1, 1])]
    internal = f"cmpl-{name}-0-abcd1234"
    steps = [
        Step(100.5, 0, {}, [], {internal: "WAITING_FOR_REMOTE_KVS"}, 0, 1, 0.2),
        Step(101.0, 1, {internal: [9, 1, 0]}, [], {internal: "RUNNING"}, 1, 0, 0.3),
        Step(102.0, 1, {}, [internal], {internal: "PREEMPTED"}, 0, 1, 0.1),
        Step(104.0, 2, {internal: [10, 1, 0]}, [], {internal: "RUNNING"}, 1, 0, 0.4),
        Step(104.5, 2, {}, [], {internal: "GONE"}, 0, 0, 0.0),
    ]
    kept = ArmRun(ON, results, steps, {"host_blocks_total": 10.0}, [HostSample(102.0, 5.0, 10.0)])
    return Outcome(Settings(), results, [ArmRun(OFF, results, steps), kept])


def test_json_has_lanes_and_usage_in_seconds_since_the_first_request(outcome: Outcome, tmp_path: Path) -> None:
    path = next(path for path in report.write(outcome, tmp_path / "new" / "reports") if path.suffix == ".json")
    run = json.loads(path.read_text())["runs"][1]
    [lane] = run["lanes"]
    assert (lane["sent"], lane["end"], lane["preemptions"], lane["recomputed"]) == (0.0, 4.0, 1, 0)
    assert [[LANE_KINDS[kind], start, end] for kind, start, end in lane["segments"]] == [
        ["waiting for Prefill", 0.5, 1.0],
        ["running", 1.0, 2.0],
        ["KV on host", 2.0, 4.0],
        ["running", 4.0, 4.5],
    ]
    assert run["device_usage"][0] == [0.5, 0.2]
    assert run["host_usage"] == [[2.0, 0.5]]
    assert run["figures"]["preemptions"] == 1


def test_json_says_what_failed_and_with_which_versions(outcome: Outcome) -> None:
    data = report.summary(outcome)
    assert data["failures"] == ["connector: 1 preemptions, at least 10 expected"]
    assert "offload-connector" in data["versions"]


def test_long_runs_are_thinned_out_for_the_page(outcome: Outcome) -> None:
    run = outcome.runs[0]
    run.steps = [Step(100 + n / 100, n, {}, [], {}, 0, 0, 0.5) for n in range(5000)]
    assert report.USAGE_POINTS <= len(report.summary(outcome)["runs"][0]["device_usage"]) < 2 * report.USAGE_POINTS


def test_page_needs_nothing_from_outside_and_no_text_ends_its_script(outcome: Outcome) -> None:
    html = report.page(report.summary(outcome))
    assert not re.search(r"https?://|<link|<img|\bsrc=|@import|url\(", html)
    assert html.count("</script>") == 1
    data = html.split("const data = ", 1)[1].split(";\nconst byId", 1)[0]
    assert json.loads(data)["runs"][0]["lanes"][0]["id"] == "</script>"


def test_every_lane_kind_has_a_colour_in_both_schemes(outcome: Outcome) -> None:
    html = report.page(report.summary(outcome))
    for kind in range(len(LANE_KINDS)):
        assert html.count(f"--k{kind}:") == 2
    assert f"--k{len(LANE_KINDS)}:" not in html
