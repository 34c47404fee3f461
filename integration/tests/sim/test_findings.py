"""Nothing that was found and mended comes back."""

import pytest
from findings import FINDINGS

from pd_integration.sim.runs import run

STEPS = 100


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_what_was_found_holds_now_and_fails_without_its_repair(finding, monkeypatch):
    outcome = run(finding.scenario, STEPS, compare=True)
    assert outcome.kind is None, outcome.detail
    finding.undo(monkeypatch)
    assert run(finding.scenario, STEPS).kind == finding.kind
