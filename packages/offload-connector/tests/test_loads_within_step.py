"""Which loads may run within their step."""

import pytest

from block_mapper import GroupKind, KVGroup
from offload_connector.within_step import LOAD_WITHIN_STEP_BYTES, WithinStep

FULL = KVGroup(GroupKind.FULL, 16)


@pytest.mark.parametrize("kind", [kind for kind in GroupKind if kind is not GroupKind.FULL])
def test_only_full_attention_loads_within_the_step(kind):
    """vLLM goes back to the first bad block of a failed load; with any other kind the blocks before it are gone."""
    windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    other = KVGroup(kind, 16, window=16 if windowed else None)
    assert WithinStep([FULL]).allows(1)
    assert not WithinStep([other]).allows(1)


@pytest.mark.parametrize("groups", [[], [FULL, FULL]])
def test_vllm_finds_requests_by_block_only_in_a_single_group(groups):
    assert not WithinStep(groups).allows(1)


def test_only_small_loads_run_within_the_step():
    assert WithinStep([FULL]).allows(LOAD_WITHIN_STEP_BYTES)
    assert not WithinStep([FULL]).allows(LOAD_WITHIN_STEP_BYTES + 1)


def test_blocks_of_the_prefix_cache_are_loaded_behind_the_step():
    """Others may read them before the failure is known, and they outlive the request."""
    assert not WithinStep([FULL], prefix_caching=True).allows(1)


def test_overlapping_steps_wait_for_the_word_that_a_failure_ends_its_request():
    """The next step is scheduled on top of the failed one: its token can be dropped, the request can't go back."""
    within_step = WithinStep([FULL], overlapping_steps=True)
    assert not within_step.allows(1)
    within_step.set_failure_policy(recompute=False)
    assert within_step.allows(1)
    within_step.set_failure_policy(recompute=True)
    assert not within_step.allows(1)
