"""What the connector does where vLLM does not do it, or does it wrong, depending on its version."""

import dataclasses
from types import SimpleNamespace

import pytest
from test_connector import TIGHT, load, manager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.request import RequestStatus

from block_mapper import GroupKind, KVGroup
from npu_copy import Direction
from offload_connector import manager as manager_module
from offload_connector import worker as worker_module
from offload_connector._vllm import block_strides
from offload_connector.manager import OffloadManager
from offload_connector.metadata import OffloadWorkerMetadata

FULL, WINDOW = KVGroup(GroupKind.FULL, 4), KVGroup(GroupKind.SLIDING_WINDOW, 4, window=8)


def request(num_tokens=10, status=RequestStatus.RUNNING, **attributes):
    return SimpleNamespace(
        request_id="r",
        num_tokens=num_tokens,
        num_output_tokens=2,
        num_output_placeholders=0,
        num_preemptions=0,
        status=status,
        skip_reading_prefix_cache=False,
        **attributes,
    )


def ready(groups):
    made = OffloadManager(groups, 1)
    made.update(OffloadWorkerMetadata(ranks=1, capacity=50, block_bytes=1))
    return made


def saved(groups, **attributes):
    made, one = ready(groups), request(**attributes)
    assert made.keep(one, [[1, 2, 3]] * len(groups), 10)
    metadata = made.build_metadata(SimpleNamespace())
    made.update(OffloadWorkerMetadata(done={metadata.store.job: 1}))
    return made, one


@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]])
@pytest.mark.parametrize("taken", [False, True])
def test_beside_a_prefix_hit_only_where_vllm_holds_the_hit(groups, taken, monkeypatch):
    monkeypatch.setattr(manager_module, "HITS_MAY_BE_TAKEN", taken)
    made, one = saved(groups)
    assert made.restorable_tokens(one, 0)[0] == 9
    assert made.restorable_tokens(one, 4)[0] == (0 if taken and len(groups) > 1 else 5)


@pytest.mark.parametrize("status", [RequestStatus.RUNNING, RequestStatus.WAITING])
def test_blocks_that_go_on_in_the_same_step_are_stored_before_it_begins(status):
    """A preempting step lets nobody in; one in which a waiting request gave way does."""
    made = ready([FULL])
    assert made.keep(request(status=status), [[1, 2, 3]], 10)
    assert made.build_metadata(SimpleNamespace()).store_first is (status is RequestStatus.WAITING)
    assert made.build_metadata(SimpleNamespace()).store_first is False


def test_the_worker_waits_for_such_a_store(make_engine):
    engine = make_engine(TIGHT)
    worker = engine.worker.connectors[0].worker
    waited, submitted = [], []
    wait, submit = worker._engine.wait, worker._engine.submit

    def noting_wait(job, timeout):
        waited.append(job)
        wait(job, timeout)

    def noting_submit(job, pairs, direction, **options):
        submitted.append((job, direction, job in waited))
        submit(job, pairs, direction, **options)

    worker._engine.wait, worker._engine.submit = noting_wait, noting_submit
    build = manager(engine).build_metadata
    manager(engine).build_metadata = lambda step: dataclasses.replace(build(step), store_first=True)
    load(engine)
    stores = set()
    while engine.scheduler.has_requests():
        before = len(waited)
        meta = engine.step().kv_connector_metadata
        if meta.store is not None:
            stores.add(meta.store.job)
            assert meta.store.job in waited[before:]
    assert stores == {job for job, direction, _ in submitted if direction is Direction.STORE}
    assert len(stores) >= 2


def test_a_victim_in_flight_keeps_nothing_where_its_state_depends_on_the_outcome():
    made = ready([FULL, KVGroup(GroupKind.RECURRENT, 1000, speculative_blocks=2)])
    one = request(num_in_flight_tokens=3)
    made.allocated(one, [[1, 2, 3], [4, 5, 6]], 0)
    assert not made.keep(one, [[1, 2, 3], [4, 5, 6]], 10)


@pytest.mark.parametrize("by_block", [False, True])
def test_a_failed_load_behind_the_step_is_told_by_block_where_vllm_asks_for_blocks(make_engine, by_block, monkeypatch):
    monkeypatch.setattr(worker_module, "FAILED_LOADS_BY_BLOCK", by_block)
    monkeypatch.setattr("offload_connector.within_step.LOAD_WITHIN_STEP_BYTES", 0)
    engine = make_engine(TIGHT)
    worker = engine.worker.connectors[0].worker
    load(engine)
    behind = next(
        meta.load_behind
        for meta in (engine.step().kv_connector_metadata for _ in range(200))
        if meta.load_behind is not None
    )
    result = SimpleNamespace(
        job=behind.job, direction=Direction.LOAD, error=RuntimeError("injected"), seconds=0.0, nbytes=0
    )
    worker.take_failed_blocks()
    worker._loads_behind[behind.job] = behind
    worker._note(result)
    assert worker.take_failed_blocks() == (set(behind.pairs[:, 1].tolist()) if by_block else set())


@pytest.mark.parametrize("follow", [False, True])
def test_a_worker_reports_every_step_where_the_schedulers_figures_wait_for_it(make_engine, follow, monkeypatch):
    monkeypatch.setattr(worker_module, "FIGURES_FOLLOW_THE_WORKERS", follow)
    worker = make_engine(TIGHT).worker.connectors[0]
    worker.get_kv_connector_stats()
    assert [worker.get_kv_connector_stats() is not None for _ in range(2)] == [follow, follow]


def test_the_stride_of_a_block_in_vllms_own_allocation():
    fields = {field.name for field in dataclasses.fields(KVCacheTensor)}
    if "layers" in fields:
        tensors = [KVCacheTensor(size=800, layers=["a", "b"], layer_stride=400, block_stride=40)]
        expected = {"a": 40, "b": 40}
    else:
        tensors = [KVCacheTensor(size=400, shared_by=["a", "b"])]
        expected = {"a": 40, "b": 40}
        if "block_stride" in fields:
            tensors.append(KVCacheTensor(size=400, shared_by=["c"], block_stride=80))
            expected["c"] = 80
    assert block_strides(KVCacheConfig(10, tensors, [])) == expected
