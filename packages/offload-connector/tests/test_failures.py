"""Copies that fail, layouts that are not known, memory that is not there."""

import numpy as np
import pytest
import torch
from byte_ranks import ByteRanks
from test_connector import TIGHT, assert_empty, counters, load, manager
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from npu_copy import CopyResult, Direction
from offload_connector import worker as worker_module
from offload_connector.within_step import LOAD_WITHIN_STEP_BYTES
from recompute_scheduler.testing import VICTIMS_MAY_BE_IN_FLIGHT


@pytest.fixture
def loads_behind(monkeypatch):
    """Every load runs behind its step."""
    monkeypatch.setattr("offload_connector.within_step.LOAD_WITHIN_STEP_BYTES", 0)


def runs_within(mode, policy):
    """Whether small loads run within their step here: a failed one can be taken back.

    With overlapping steps a token may have been computed on top of it: that can be dropped with its request, but not
    computed again; and vLLM before 0.32 puts it out where the request is preempted meanwhile.
    """
    return mode == "sync" or (policy == "fail" and not VICTIMS_MAY_BE_IN_FLIGHT)


def failing(engine, direction, every=2, rank=0):
    """Let every second job of this direction fail on one rank, after it has copied garbage."""
    copies = engine.worker.connectors[rank].worker._engine
    poll, failed = copies.poll, []

    def poll_with_failures():
        results = []
        for result in poll():
            if result.direction is direction and result.job % every == 0:
                failed.append(result.job)
                result = CopyResult(result.job, direction, result.nbytes, result.seconds, OSError("injected"))
            results.append(result)
        return results

    copies.poll = poll_with_failures
    return failed


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_store_falls_back(make_engine, ranks):
    engine = make_engine(TIGHT, ranks=ranks)
    failed = failing(engine, Direction.STORE, rank=ranks - 1)
    load(engine, requests=8)
    engine.run()
    figures = counters(engine)
    assert failed
    assert figures["fallback"] >= len(failed)
    assert figures["copy_errors"] == len(failed)
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())
    assert_empty(engine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_load_behind_the_step_is_recomputed(make_engine, loads_behind, ranks):
    engine = make_engine(TIGHT, ranks=ranks)
    failed = failing(engine, Direction.LOAD, rank=ranks - 1)
    load(engine, requests=8)
    engine.run()
    assert failed
    assert counters(engine)["fallback"] >= len(failed)
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())
    assert_empty(engine)


def test_a_failed_load_is_recomputed_however_it_ran(make_engine):
    engine = make_engine(TIGHT)
    failed = failing(engine, Direction.LOAD)
    load(engine, requests=8)
    engine.run()
    assert failed
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())
    assert_empty(engine)


def note_loads(engine):
    """Per request, output tokens that were out when each of its loads was planned."""
    allocated, noted = manager(engine).allocated, {}

    def noting(request, block_ids, num_external_tokens):
        if num_external_tokens:
            noted.setdefault(request.request_id, []).append(len(engine.outputs[request.request_id]))
        allocated(request, block_ids, num_external_tokens)

    manager(engine).allocated = noting
    return noted


def report_late(engine):
    """A load within its step is under way when the forward is launched: nobody may take its word before its end."""
    worker = engine.worker.connectors[0].worker
    copies = worker._engine
    poll, wait, waited, late = copies.poll, copies.wait, set(), []

    def poll_late():
        late.extend(poll())
        told = [result for result in late if result.job in waited or result.job not in worker._loads_within]
        late[:] = [result for result in late if result not in told]
        return told

    def wait_known(job, timeout):
        if all(result.job != job for result in late):
            wait(job, timeout)
        waited.add(job)

    copies.poll, copies.wait = poll_late, wait_known


@pytest.mark.parametrize("late", [False, True])
def test_policy_fail_ends_the_request_before_a_token_of_the_failed_load_goes_out(make_engine, mode, late):
    engine = make_engine(TIGHT, policy="fail")
    failed = failing(engine, Direction.LOAD)
    loads = note_loads(engine)
    if late:
        report_late(engine)
    load(engine, requests=24)
    within = 0
    while engine.scheduler.has_requests():
        within += engine.step().kv_connector_metadata.load_now is not None
    engine.run()
    errors = [name for name, end in engine.ends.items() if end.finish_reason is FinishReason.ERROR]
    assert failed
    assert within > len(failed) if runs_within(mode, "fail") else within == 0
    assert errors
    assert all(len(engine.outputs[name]) == loads[name][-1] for name in errors)
    assert all(len(tokens) == 40 for name, tokens in engine.outputs.items() if name not in errors)
    assert_empty(engine)


def test_policy_fail_ends_a_request_whose_load_behind_the_step_failed(make_engine, loads_behind):
    engine = make_engine(TIGHT, policy="fail")
    failed = failing(engine, Direction.LOAD)
    load(engine, requests=8)
    engine.run()
    errors = [name for name, end in engine.ends.items() if end.finish_reason is FinishReason.ERROR]
    assert failed
    assert errors
    assert_empty(engine)


def kinds_of_loads(engine):
    load(engine)
    kinds = set()
    while engine.scheduler.has_requests():
        meta = engine.step().kv_connector_metadata
        kinds |= {kind for kind in ("load_now", "load_behind") if getattr(meta, kind) is not None}
    return kinds


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_overlapping_steps_load_within_the_step_only_if_a_failure_ends_the_request(make_engine, mode, policy):
    kind = "load_now" if runs_within(mode, policy) else "load_behind"
    assert kinds_of_loads(make_engine(TIGHT, policy=policy)) == {kind}


def test_a_scheduler_that_may_preempt_a_request_in_flight_counts_as_one_that_recomputes(make_engine, mode, monkeypatch):
    """vLLM before 0.32 puts out the token that was in flight; that of a failed load must not be among them."""
    monkeypatch.setattr("recompute_scheduler.preemption.VICTIMS_MAY_BE_IN_FLIGHT", True)
    engine = make_engine(TIGHT, policy="fail")
    assert kinds_of_loads(engine) == {"load_behind" if mode == "async" else "load_now"}


def test_a_scheduler_that_does_not_tell_its_policy_is_taken_to_recompute(make_engine, mode, monkeypatch):
    monkeypatch.setattr("recompute_scheduler.preemption.HeedsLoadFailurePolicy", type("Nothing", (), {}))
    engine = make_engine(TIGHT, policy="fail")
    assert kinds_of_loads(engine) == {"load_behind" if mode == "async" else "load_now"}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_leaves_nothing_in_the_prefix_cache(make_engine, policy):
    """Its request may be gone when the failure is told, and then nobody takes its blocks back."""
    engine = make_engine(TIGHT, policy=policy, enable_prefix_caching=True)
    scheduler = engine.scheduler
    failed, bad = failing(engine, Direction.LOAD, every=1), set()
    for index in range(6):
        engine.add(f"r{index}", range(40 * index, 40 * index + 30), 40)
    while not failed:
        scheduled = scheduler.schedule()
        engine._in_flight.append((scheduled, engine.run_model(scheduled)))
        meta = scheduled.kv_connector_metadata
        for job in (meta.load_now, meta.load_behind):
            if job is not None:
                bad.update(job.pairs[:, 1].tolist())
        if failed:
            scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        if failed or len(engine._in_flight) >= engine._depth:
            engine._take_in()
    engine.run()
    assert bad
    pool = scheduler.kv_cache_manager.block_pool
    assert [block for block in bad if pool.blocks[block].block_hash is not None] == []
    assert_empty(engine)


def test_large_loads_run_behind_the_step(make_engine, loads_behind):
    engine = make_engine(TIGHT)
    load(engine)
    behind = []
    while engine.scheduler.has_requests():
        meta = engine.step().kv_connector_metadata
        assert meta.load_now is None
        if meta.load_behind is not None:
            behind += meta.load_behind.requests
    assert behind
    assert len(behind) == counters(engine)["preempted_restored"]


def test_small_loads_run_within_the_step(make_engine, mode):
    assert LOAD_WITHIN_STEP_BYTES > 0
    kinds = ["load_now", "load_behind"] if runs_within(mode, "fail") else ["load_behind", "load_now"]
    engine = make_engine(14, policy="fail")
    load(engine)
    loaded = 0
    while engine.scheduler.has_requests():
        meta = engine.step().kv_connector_metadata
        job, other = (getattr(meta, kind) for kind in kinds)
        assert other is None
        loaded += len(job.pairs) if job is not None else 0
    assert loaded == counters(engine)["blocks_loaded"] > 0
    assert counters(engine)["preempted_restored"] >= 2


def test_verification_is_silent_when_blocks_come_back_right(make_engine):
    engine = make_engine(TIGHT, options={"verify_restored_blocks": True})
    load(engine)
    engine.run()
    figures = counters(engine)
    assert figures["preempted_restored"] >= 3
    assert "copy_errors" not in figures


def test_verification_finds_a_byte_that_changed_on_the_host(make_engine, loads_behind):
    engine = make_engine(TIGHT, options={"verify_restored_blocks": True})
    load(engine)
    host = engine.worker.connectors[0].worker._host
    changed = False
    while engine.scheduler.has_requests():
        engine.step()
        if not changed and manager(engine)._preemptions:
            for region in range(2):
                host.block_view(region)[1:, 0] ^= 1
            changed = True
    assert changed
    assert counters(engine)["copy_errors"] >= 1
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())


def test_an_unknown_layout_warns_once_and_leaves_the_fallback(make_engine, monkeypatch, caplog_vllm):
    def refuse(kv_caches, num_blocks, block_dim):
        raise worker_module.UnsupportedLayout("layer.0 has a shape nobody knows")

    monkeypatch.setattr(worker_module, "find_regions", refuse)
    engine = make_engine(TIGHT, ranks=2)
    load(engine)
    engine.run()
    told = [r.getMessage() for r in caplog_vllm.records if "layer.0 has a shape nobody knows" in r.getMessage()]
    assert len(told) == 1
    figures = counters(engine)
    assert figures["fallback"] >= 1
    assert "preempted_offloaded" not in figures
    assert all(len(tokens) == 40 for tokens in engine.outputs.values())


def test_an_unknown_kind_of_group_warns_and_leaves_the_fallback(mode):
    from conftest import SCHEDULERS, transfer_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from offload_connector import groups
    from recompute_scheduler.testing import BLOCK_SIZE, ScriptedEngine, make_config, make_kv_cache_config

    class StrangeSpec(FullAttentionSpec):
        pass

    spec = StrangeSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    config = make_config(async_scheduling=mode == "async", kv_transfer_config=transfer_config())
    kv_cache_config = make_kv_cache_config(TIGHT, [spec])
    original = groups.FullAttentionSpec
    groups.FullAttentionSpec = type("Nothing", (), {})
    try:
        workers = ByteRanks(config, kv_cache_config)
        engine = ScriptedEngine(SCHEDULERS[mode], config, kv_cache_config, workers)
    finally:
        groups.FullAttentionSpec = original
    workers.scheduler = engine.scheduler
    load(engine)
    engine.run()
    workers.shutdown()
    assert counters(engine)["fallback"] >= 1


def test_a_budget_below_one_block_is_an_error_that_says_how_much(make_engine):
    with pytest.raises(ValueError, match="gives 100 bytes, but a block of this model takes 2048"):
        make_engine(TIGHT, options={"cpu_bytes_to_use_per_rank": 100})


def test_the_smallest_rank_decides(make_engine):
    from offload_connector.metadata import OffloadWorkerMetadata

    small = OffloadWorkerMetadata(ranks=1, capacity=7, block_bytes=10)
    large = OffloadWorkerMetadata(ranks=1, capacity=9, block_bytes=8)
    both = small.aggregate(large)
    assert (both.ranks, both.capacity, both.block_bytes) == (2, 7, 10)
    reports = OffloadWorkerMetadata(done={1: 1, 2: 1}, failed={2: "x"})
    joined = both.aggregate(reports).aggregate(OffloadWorkerMetadata(done={1: 1}))
    assert (joined.capacity, joined.done, joined.failed) == (7, {1: 2, 2: 1}, {2: "x"})


def test_shutdown_with_copies_in_flight_ends(make_engine, loads_behind):
    engine = make_engine(TIGHT)
    load(engine)
    while engine.step().kv_connector_metadata.load_behind is None:
        pass
    for connector in engine.worker.connectors:
        connector.shutdown()
        connector.shutdown()
        assert connector.worker._engine is None


def test_pairs_of_no_blocks_are_reported_too(make_engine):
    engine = make_engine(TIGHT)
    copies = engine.worker.connectors[0].worker._engine
    copies.submit(99, np.empty((0, 2), np.int64), Direction.STORE)
    copies.wait(99, 5)
    assert [result.job for result in copies.poll()] == [99]
