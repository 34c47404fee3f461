"""Every kind of KV cache on the real engine: preempted requests put out the tokens of a run without pressure."""

import pytest

from pd_integration.families import RECIPES
from pd_integration.families.__main__ import in_own_process
from pd_integration.families.run import REQUESTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ACCEPTANCE_NOISE = 0.01
"""A resumed request has no drafts in its first step; that moves the share of accepted drafts by less than this."""


@pytest.mark.parametrize("name", RECIPES)
def test_saved_requests_go_on_exactly(name):
    ample, _, *saved = in_own_process(name)
    assert ample["preemptions"] == 0
    # The adapter changes what is put out, of the requests that have it and of no other.
    assert ample["adapted"] in (None, REQUESTS // 2)
    assert (ample["adapted"] is None) == (RECIPES[name].adapter is None)
    assert saved
    for row in saved:
        figures = row["offloaded"]
        assert row["preemptions"] > 0
        assert figures["preempted_offloaded"] == row["preemptions"]
        # With prefix caching a request may find all its blocks on the device still; nothing else may come between.
        on_device = figures.get("fallback served_elsewhere", 0) if "prefix caching" in name else 0
        assert figures["preempted_restored"] + on_device == figures["preempted_offloaded"]
        assert sum(count for reason, count in figures.items() if reason.startswith("fallback")) == on_device
        # Checksums of every block, taken before the store and compared after the load.
        assert figures.get("copy_errors", 0) == 0
        assert figures["host_blocks_used"] == 0
        if row["exact"]:
            assert row["same"] == REQUESTS
        if ample["acceptance"] is not None:
            assert row["acceptance"] > ample["acceptance"] - ACCEPTANCE_NOISE
