"""Saved requests come back when those that run have room to grow, and nobody waits for ever."""

from types import SimpleNamespace

import pytest
from recording_connector import RecordingConnector
from vllm.v1.request import RequestStatus

from recompute_scheduler.headroom import ALONE, GROWTH, LEAST_GROWTH, LONGEST, PATIENCE, Headroom
from recompute_scheduler.testing import BLOCK_SIZE, make_kv_cache_config

LENGTH = 500
RUNNING = [SimpleNamespace(num_tokens=LENGTH)] * 8
PATIENCE_STEPS = int(PATIENCE * LENGTH)


def saved(name):
    return SimpleNamespace(request_id=name, status=RequestStatus.PREEMPTED, num_computed_tokens=0)


@pytest.fixture
def headroom():
    return Headroom(make_kv_cache_config(100), watermark_blocks=3)


def test_nothing_is_kept_free_beyond_the_watermark_when_nobody_waits(headroom):
    assert headroom.blocks(RUNNING, step=1) == 3


@pytest.mark.parametrize(("waiting", "growth"), [(1, LEAST_GROWTH), (2, 4 * ALONE), (3, 9 * ALONE), (4, GROWTH)])
def test_room_for_the_growth_of_all_running_requests_the_more_wait_the_larger(headroom, waiting, growth):
    for name in "abcd"[:waiting]:
        headroom.note_saved(saved(name), step=1)
    assert headroom.blocks(RUNNING, step=1) == int(len(RUNNING) * LENGTH * growth / BLOCK_SIZE)


def test_it_shrinks_to_the_least_as_the_wait_goes_on(headroom):
    for name in "ab":
        headroom.note_saved(saved(name), step=1)
    kept = [headroom.blocks(RUNNING, step) for step in range(1, 6 * PATIENCE_STEPS)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1] == int(len(RUNNING) * LENGTH * LEAST_GROWTH / BLOCK_SIZE)


def test_more_waiting_requests_are_let_back_more_slowly(headroom):
    headroom.note_saved(saved("a"), step=1)
    alone = headroom.blocks(RUNNING, step=PATIENCE_STEPS)
    headroom.note_saved(saved("b"), step=1)
    assert headroom.blocks(RUNNING, step=PATIENCE_STEPS) > alone


def test_in_the_end_nothing_is_kept_free_however_many_wait(headroom):
    for name in "abcdefgh":
        headroom.note_saved(saved(name), step=1)
    last = 1 + int(LONGEST * LENGTH)
    assert headroom.blocks(RUNNING, step=last) > 3
    assert headroom.blocks(RUNNING, step=last + 1) == 3


def test_a_request_that_runs_again_counts_no_more(headroom):
    request = saved("a")
    headroom.note_saved(request, step=1)
    request.status = RequestStatus.RUNNING
    assert headroom.blocks(RUNNING, step=2) == 3


def test_a_request_whose_kv_has_been_loaded_counts_no_more(headroom):
    request = saved("a")
    headroom.note_saved(request, step=1)
    request.num_computed_tokens = 50
    assert headroom.blocks(RUNNING, step=2) == 3


def test_the_watermark_of_the_operator_is_the_least(headroom):
    headroom.note_saved(saved("a"), step=1)
    assert headroom.blocks(RUNNING[:1], step=10_000) == 3
    assert headroom.blocks([], step=1) == 3


def test_sliding_windows_do_not_grow():
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)
    headroom = Headroom(make_kv_cache_config(100, [spec]), watermark_blocks=0)
    headroom.note_saved(saved("a"), step=1)
    assert headroom.blocks(RUNNING, step=1) == 0


@pytest.mark.parametrize("num_blocks", [14, 20, 40])
def test_the_longest_wait_is_bounded(make_engine, num_blocks):
    """Under steady pressure every saved request runs again before all that ran when it was preempted could have ended
    one after the other."""
    RecordingConnector.answer = True
    engine = make_engine(num_blocks)
    max_tokens = 60
    for index in range(24):
        engine.add(f"r{index}", range(10, 50 + index % 7), max_tokens)
    since, longest, step = {}, 0, 0
    while engine.scheduler.has_requests():
        scheduled = engine.step()
        step += 1
        for name in scheduled.num_scheduled_tokens:
            if name in since:
                longest = max(longest, step - since.pop(name))
        for name, request in engine.scheduler.requests.items():
            if request.status is RequestStatus.PREEMPTED:
                since.setdefault(name, step)
    assert RecordingConnector.calls
    assert 0 < longest <= 4 * max_tokens
    assert all(len(tokens) == max_tokens for tokens in engine.outputs.values())
