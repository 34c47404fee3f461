"""The CUDA backend: its driver call over a fake, and all of it where there is a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from fake_npu import FakeNpu

from npu_copy import CopyEngine, Direction, HostPool, InsufficientHostMemory, Region, find_regions
from npu_copy._host_buffer import RegisteredBuffer
from npu_copy._threads import Team
from npu_copy.backends import cuda
from npu_copy.backends.stream import first_working

STORE, LOAD = Direction.STORE, Direction.LOAD
BLOCKS, HOST_BLOCKS = 9, 7


def caches(device: str) -> tuple[dict[str, torch.Tensor], list[Region]]:
    padded = torch.zeros(BLOCKS, 96, dtype=torch.uint8, device=device)
    kv = {"dense": torch.zeros(BLOCKS, 4, 64, dtype=torch.uint8, device=device), "padded": padded[:, :64]}
    for tensor in kv.values():
        tensor[:] = torch.arange(BLOCKS, dtype=torch.uint8, device=device).view(-1, *[1] * (tensor.dim() - 1))
    return kv, find_regions(kv, BLOCKS)


class TestDriverCall:
    """``cuMemcpyBatchAsync`` with the struct and arguments of 12.8."""

    @pytest.fixture
    def path(self, npu: FakeNpu) -> cuda.CudaBatchPath:
        address = ctypes.cast(npu.library.fake_cuMemcpyBatchAsync, ctypes.c_void_p).value
        assert address is not None
        return cuda.CudaBatchPath(address)

    def test_blocks_go_there_and_back(self, npu: FakeNpu, path: cuda.CudaBatchPath, monkeypatch) -> None:
        kv, regions = caches("cpu")
        pool = HostPool.allocate(regions, HOST_BLOCKS, threads=1)
        backend = first_working("cuda", npu, (lambda: path,), regions, pool)
        monkeypatch.setattr("npu_copy.engine.make_backend", lambda *_: backend)
        engine = CopyEngine(regions, pool)
        assert engine.backend == "cuda (cuMemcpyBatchAsync)"
        engine.submit(1, [[3, 1], [4, 2]], STORE)
        engine.submit(2, [[1, 8], [2, 5]], LOAD)  # waits for the store through the compute stream
        engine.wait(2, 10)
        assert [int(kv[name][b].unique()) for name in kv for b in (8, 5)] == [3, 4, 3, 4]
        npu.library.fake_refuse_batch(999)
        engine.submit(3, [[3, 1]], STORE)
        engine.wait(3, 10)
        errors = {r.job: r.error for r in engine.poll()}
        assert [errors[1], errors[2]] == [None, None]
        assert str(errors[3]) == "cuMemcpyBatchAsync failed with CUDA error 999"
        engine.close(10)
        pool.close()


class FakeCudart:
    """Counts what is registered."""

    def __init__(self, error: int) -> None:
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_host_memory_is_registered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = RegisteredBuffer(12_345, Team(1), None)
    assert runtime.registered == {buffer.address: 12_345}
    buffer.close()
    assert runtime.registered == {}


def test_memory_that_cannot_be_registered_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(2))
    with pytest.raises(InsufficientHostMemory, match=r"cudaHostRegister could not pin 4096 bytes \(error 2.*memlock"):
        RegisteredBuffer(4096, Team(1), None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestDevice:
    @pytest.fixture(params=["default", "tensors"])
    def engine(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyEngine]:
        if request.param == "tensors":
            monkeypatch.setattr(cuda, "_cuda_batch", lambda: None)
        self.kv, self.regions = caches("cuda")
        self.pool = HostPool.allocate(self.regions, HOST_BLOCKS)
        engine = CopyEngine(self.regions, self.pool)
        yield engine
        engine.close(30)
        self.pool.close()

    def host_values(self, block: int) -> set[int]:
        return {int(v) for i in range(len(self.regions)) for v in self.pool.block_view(i)[block].unique()}

    def test_pool_is_pinned(self, engine: CopyEngine) -> None:
        assert self.pool.block_view(0).is_pinned()

    def test_blocks_go_there_and_back(self, engine: CopyEngine) -> None:
        engine.submit(1, [[3, 1], [4, 2]], STORE)
        engine.submit(2, [[1, 8], [2, 5]], LOAD)
        engine.wait(2, 30)
        assert [int(t[b].unique()) for t in self.kv.values() for b in (8, 5)] == [3, 4, 3, 4]
        assert [r.error for r in engine.poll()] == [None, None]

    def test_a_store_waits_for_compute_and_compute_for_it(self, engine: CopyEngine) -> None:
        torch.cuda._sleep(200_000_000)
        for tensor in self.kv.values():
            tensor[3] = 77
        engine.submit(1, [[3, 1]], STORE)
        for tensor in self.kv.values():
            tensor[3] = 78
        assert engine.poll() == []
        engine.wait(1, 30)
        assert self.host_values(1) == {77}

    def test_a_blocking_load_is_seen_by_compute(self, engine: CopyEngine) -> None:
        engine.submit(1, [[4, 2]], STORE)
        torch.cuda._sleep(200_000_000)
        for tensor in self.kv.values():
            tensor[6] = 99
        engine.submit(2, [[2, 6]], LOAD, block_compute=True)
        seen = [tensor[6].clone() for tensor in self.kv.values()]
        assert {int(v) for part in seen for v in part.unique()} == {4}
