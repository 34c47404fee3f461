"""The NPU backend over a fake libascendcl and a fake torch.npu."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_npu import FakeNpu

from npu_copy import CopyEngine, Direction, HostPool, InsufficientHostMemory, find_regions
from npu_copy._acl import Acl, AclError

STORE, LOAD = Direction.STORE, Direction.LOAD
BLOCKS, HOST_BLOCKS = 8, 6
# Long enough for a stream that wrongly does not wait to have run.
A_WHILE = 0.1


class Cache:
    """Two layers of K and V, one of padded pages, and their host pool; block b of every tensor holds b + 1."""

    def __init__(self) -> None:
        padded = torch.zeros(BLOCKS, 96, dtype=torch.uint8)
        self.tensors = [torch.zeros(BLOCKS, 4, 8, dtype=torch.uint8) for _ in range(4)] + [padded[:, :64]]
        for tensor in self.tensors:
            tensor[:] = torch.arange(1, BLOCKS + 1, dtype=torch.uint8).view(-1, *[1] * (tensor.dim() - 1))
        k0, v0, k1, v1, state = self.tensors
        self.regions = find_regions({"0": (k0, v0), "1": (k1, v1), "2": [state]}, BLOCKS, block_dim=0)
        self.pool = HostPool.allocate(self.regions, HOST_BLOCKS, backend="npu", threads=1)

    def device_block(self, block: int) -> list[torch.Tensor]:
        return [tensor[block] for tensor in self.tensors]

    def host_values(self, block: int) -> set[int]:
        return {int(v) for i in range(len(self.regions)) for v in self.pool.block_view(i)[block].unique()}

    def device_values(self, block: int) -> set[int]:
        return {int(v) for part in self.device_block(block) for v in part.unique()}


@pytest.fixture
def cache(npu: FakeNpu) -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.pool.close()


@pytest.fixture
def engine(npu: FakeNpu, cache: Cache) -> Iterator[CopyEngine]:
    engine = CopyEngine(cache.regions, cache.pool, backend="npu")
    yield engine
    for stream in npu.streams:
        stream.hold(False)
    engine.close(10)


def copy_streams(npu: FakeNpu) -> list:
    return [s for s in npu.streams if s.role == "copy"]


def test_blocks_go_there_and_back_by_one_batch_a_job(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    assert engine.backend == "npu (aclrtMemcpyBatchAsync)"
    before = npu.library.fake_batches()
    engine.submit(1, np.array([[3, 1], [4, 2], [6, 5]]), STORE)
    engine.wait(1, 10)
    assert [cache.host_values(b) for b in (1, 2, 5)] == [{4}, {5}, {7}]
    engine.submit(2, np.array([[5, 1], [1, 7], [2, 6]]), LOAD)
    engine.wait(2, 10)
    assert [cache.device_values(b) for b in range(BLOCKS)] == [{1}, {7}, {3}, {4}, {5}, {6}, {5}, {4}]
    assert npu.library.fake_batches() == before + 2
    results = engine.poll()
    assert [(r.job, r.direction, r.error) for r in results] == [(1, STORE, None), (2, LOAD, None)]
    assert all(r.nbytes == 3 * cache.pool.nbytes // HOST_BLOCKS and r.seconds >= 0 for r in results)


def store_waits_for_compute(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    npu.compute.hold()
    for part in cache.device_block(3):
        npu.fill(part, 77)
    engine.submit(1, [[3, 1]], STORE)
    npu.settle(A_WHILE)
    npu.compute.hold(False)
    engine.wait(1, 10)
    assert cache.host_values(1) == {77}


def compute_waits_for_store(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    for stream in copy_streams(npu):
        stream.hold()
    engine.submit(1, [[3, 1]], STORE)
    for part in cache.device_block(3):
        npu.fill(part, 77)
    npu.settle(A_WHILE)
    for stream in copy_streams(npu):
        stream.hold(False)
    engine.wait(1, 10)
    assert cache.host_values(1) == {4}


def load_waits_for_compute(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    npu.compute.hold()
    for part in cache.device_block(3):
        npu.fill(part, 77)  # the block's last owner is still writing
    engine.submit(1, [[1, 3]], LOAD)
    npu.settle(A_WHILE)
    npu.compute.hold(False)
    engine.wait(1, 10)
    npu.settle()
    assert cache.device_values(3) == {0}


def compute_waits_for_blocking_load(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    for stream in copy_streams(npu):
        stream.hold()
    engine.submit(1, [[1, 3]], LOAD, block_compute=True)
    seen = [npu.read(part) for part in cache.device_block(3)]
    npu.settle(A_WHILE)
    for stream in copy_streams(npu):
        stream.hold(False)
    engine.wait(1, 10)
    npu.settle()
    assert {int(v) for part in seen for v in part.unique()} == {0}


Scenario = Callable[[FakeNpu, Cache, CopyEngine], None]
ORDERINGS: list[tuple[Scenario, str]] = [
    (store_waits_for_compute, "copy"),
    (compute_waits_for_store, "compute"),
    (load_waits_for_compute, "copy"),
    (compute_waits_for_blocking_load, "compute"),
]


@pytest.mark.parametrize("scenario", [s for s, _ in ORDERINGS])
def test_streams_that_run_late_keep_their_order(
    scenario: Scenario, npu: FakeNpu, cache: Cache, engine: CopyEngine
) -> None:
    scenario(npu, cache, engine)


@pytest.mark.parametrize(("scenario", "role"), ORDERINGS)
def test_each_ordering_check_fails_when_its_wait_is_taken_out(
    scenario: Scenario, role: str, npu: FakeNpu, cache: Cache, engine: CopyEngine
) -> None:
    npu.ignores_waits = role
    with pytest.raises(AssertionError):
        scenario(npu, cache, engine)


@pytest.mark.parametrize("scenario", [store_waits_for_compute, load_waits_for_compute])
def test_ordering_fails_when_the_task_queue_is_not_emptied_before_the_copies(
    scenario: Scenario, npu: FakeNpu, cache: Cache, engine: CopyEngine
) -> None:
    npu.handle_empties_queue = False
    with pytest.raises(AssertionError):
        scenario(npu, cache, engine)


def test_nothing_waits_for_an_ordinary_load(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    for stream in copy_streams(npu):
        stream.hold()
    engine.submit(1, [[1, 3]], LOAD)
    npu.fill(cache.tensors[0][5], 77)
    npu.settle(A_WHILE)
    assert int(cache.tensors[0][5, 0, 0]) == 77
    assert engine.poll() == []
    with pytest.raises(TimeoutError, match=r"load job 1 \(192 bytes\) not done in 0.01 s"):
        engine.wait(1, 0.01)
    with pytest.raises(TimeoutError, match=r"jobs \[1\] still running after 0.01 s"):
        engine.close(0.01)


def test_jobs_of_one_direction_are_reported_in_order(npu: FakeNpu, cache: Cache, engine: CopyEngine) -> None:
    for job in range(4):
        engine.submit(job, [[1 + job, 1 + job]], STORE if job % 2 else LOAD)
    for job in range(4):
        engine.wait(job, 10)
    assert [r.job for r in engine.poll()] == [1, 3, 0, 2]


def test_a_refused_batch_is_reported_for_its_job_and_later_jobs_go_on(
    npu: FakeNpu, cache: Cache, engine: CopyEngine
) -> None:
    npu.library.fake_refuse_batch(507899)
    engine.submit(1, [[3, 1]], STORE)
    npu.library.fake_refuse_batch(0)
    engine.submit(2, [[4, 2]], STORE)
    engine.wait(2, 10)
    first, second = engine.poll()
    assert isinstance(first.error, AclError)
    assert first.error.code == 507899
    assert (second.job, second.error) == (2, None)
    assert cache.host_values(2) == {5}


def test_a_copy_that_fails_on_the_device_is_reported_for_its_job(
    npu: FakeNpu, cache: Cache, engine: CopyEngine
) -> None:
    npu.library.fake_fail_next_copy(507015)
    engine.submit(1, [[3, 1]], STORE)
    engine.wait(1, 10)
    engine.submit(2, [[4, 2]], STORE)
    engine.wait(2, 10)
    first, second = engine.poll()
    assert "507015" in str(first.error)
    assert (second.job, second.error) == (2, None)


def test_the_failing_copy_of_a_batch_is_named(npu: FakeNpu, cache: Cache, fake_acl: Path) -> None:
    host = cache.pool.block_view(0)
    device = cache.tensors[0]
    good, bad = host[1].data_ptr(), device[1].data_ptr()  # the second destination is no host memory
    destinations = np.array([good, bad], np.uint64)
    sources = np.array([device[2].data_ptr()] * 2, np.uint64)
    stream = npu.Stream()
    with pytest.raises(AclError, match=f"error 107000 at copy 1: 32 bytes from {sources[1]:#x} to {bad:#x}"):
        Acl(str(fake_acl)).copy_batch(destinations, sources, np.full(2, 32, np.uint64), STORE, stream.npu_stream)


def test_a_batch_call_that_the_driver_refuses_is_not_used(
    npu: FakeNpu, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    npu.library.fake_refuse_batch(207000)
    engine = CopyEngine(cache.regions, cache.pool, backend="npu")
    assert engine.backend == "npu (Tensor.copy_)"
    assert "aclrtMemcpyBatchAsync does not work here" in caplog.text
    engine.submit(1, [[3, 1], [4, 2]], STORE)
    engine.submit(2, [[2, 7]], LOAD)
    engine.wait(2, 10)
    assert [cache.host_values(1), cache.host_values(2), cache.device_values(7)] == [{4}, {5}, {5}]


def test_a_runtime_without_the_batch_call_copies_tensors(
    npu: FakeNpu, cache: Cache, compile_c: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Acl(str(compile_c(Path(__file__).with_name("fake_acl.c"), "-DWITHOUT_BATCH")))
    monkeypatch.setattr("npu_copy._acl.load", lambda: old)
    assert CopyEngine(cache.regions, cache.pool, backend="npu").backend == "npu (Tensor.copy_)"


def test_vllm_ascends_batched_op_is_taken_first(
    npu: FakeNpu, cache: Cache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def swap(sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, direction: int) -> None:
        calls.append(direction)
        handle = npu.current_stream().npu_stream
        for s, d, n in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
            npu.library.fake_copy(handle, d, s, n)

    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define("swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes, int direction) -> ()")
    library.impl("swap_blocks_batch", swap, "CPU")
    try:
        with caplog.at_level(logging.INFO):
            engine = CopyEngine(cache.regions, cache.pool, backend="npu")
        assert engine.backend == "npu (swap_blocks_batch)"
        assert caplog.text.count("copies by swap_blocks_batch") == 1
        store_waits_for_compute(npu, cache, engine)
        engine.submit(2, [[1, 6]], LOAD)
        engine.wait(2, 10)
        assert cache.device_values(6) == {77}
        assert calls == [1, 1, 0]  # the probe, the store, the load
    finally:
        library._destroy()
        vars(torch.ops._C_ascend).pop("swap_blocks_batch", None)


def test_pinned_memory_is_exactly_what_was_asked_for(npu: FakeNpu, cache: Cache) -> None:
    assert npu.library.fake_pinned_bytes() == cache.pool.nbytes == HOST_BLOCKS * (4 * 32 + 64)
    assert cache.pool.pinned
    cache.pool.close()
    assert npu.library.fake_pinned_bytes() == 0


def test_memory_the_driver_cannot_pin_is_an_error_with_the_fix(npu: FakeNpu, cache: Cache) -> None:
    npu.library.fake_refuse_malloc(1)
    with pytest.raises(InsufficientHostMemory, match=r"aclrtMallocHost could not pin .* --shm-size"):
        HostPool.allocate(cache.regions, HOST_BLOCKS, backend="npu")


def test_without_torch_npu_the_error_says_so() -> None:
    regions = find_regions({"0": torch.zeros(BLOCKS, 32)}, BLOCKS, block_dim=0)
    pool = HostPool.allocate(regions, HOST_BLOCKS)
    with pytest.raises(RuntimeError, match="needs torch_npu"):
        CopyEngine(regions, pool, backend="npu")
    pool.close()
