"""The engine on the CPU backend, with the compiled copy loop and with the one in Python."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npu_copy
from npu_copy import CopyEngine, Direction, HostPool, _native, find_regions
from npu_copy._threads import Team
from npu_copy.backends import cpu

STORE, LOAD = Direction.STORE, Direction.LOAD
BLOCKS, HOST_BLOCKS = 23, 17


@pytest.fixture(scope="session")
def helper(compile_c: Callable[..., Path]) -> Path:
    return compile_c(Path(npu_copy.__file__).with_name("_blockcopy.c"))


@pytest.fixture(params=["native", "memmove"])
def copy_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = request.getfixturevalue("helper") if request.param == "native" else Path("/nowhere.so")
    loaded = _native.load_block_copy(library)
    monkeypatch.setattr(cpu, "load_block_copy", lambda: loaded)
    return request.param


def kv_caches() -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Dense, padded, K/V-first and odd-sized layouts, filled with noise."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)

    packed = noise(BLOCKS, 3, 1000)
    return {
        "dense": [noise(BLOCKS, 4096), noise(BLOCKS, 4096)],
        "pair": noise(2, BLOCKS, 640),
        "odd": noise(BLOCKS, 4099)[:, 1:4098],
        "tiny": noise(BLOCKS, 3),
        "packed.0": packed[:, 0],
        "packed.2": packed[:, 2],
    }


@pytest.fixture
def engine(copy_loop: str) -> Iterator[CopyEngine]:
    kv = kv_caches()
    regions = find_regions(kv, BLOCKS)
    pool = HostPool.allocate(regions, HOST_BLOCKS, threads=2)
    engine = CopyEngine(regions, pool)
    engine.kv, engine.regions, engine.pool = kv, regions, pool  # type: ignore[attr-defined]
    assert engine.backend == f"cpu ({copy_loop})"
    yield engine
    engine.close(10)
    pool.close()


def snapshot(engine) -> list[torch.Tensor]:
    return [r.block_view().clone() for r in engine.regions]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    store=st.lists(
        st.tuples(st.integers(1, BLOCKS - 1), st.integers(1, HOST_BLOCKS - 1)),
        unique_by=lambda p: p[1],
        max_size=HOST_BLOCKS,
    ),
    targets=st.permutations(range(1, BLOCKS)),
    block_compute=st.booleans(),
    slice_bytes=st.sampled_from([(1, 1), (1000, 10_000), cpu._SLICE_BYTES]),
)
def test_what_is_loaded_is_what_was_stored(engine, store, targets, block_compute, slice_bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_SLICE_BYTES", slice_bytes)
        before = snapshot(engine)
        engine.submit(1, store, STORE)
        for i, blocks in enumerate(before):
            for device, host in store:
                assert torch.equal(engine.pool.block_view(i)[host], blocks[device])
        load = [(host, target) for (_, host), target in zip(store, targets, strict=False)]
        engine.submit(2, load, LOAD, block_compute=block_compute)
        engine.wait(2, 10)
        expected = [blocks.clone() for blocks in before]
        for (device, _), target in zip(store, targets, strict=False):
            for blocks, old in zip(expected, before, strict=True):
                blocks[target] = old[device]
        for got, wanted in zip(snapshot(engine), expected, strict=True):
            assert torch.equal(got, wanted)
        assert [(r.job, r.error) for r in engine.poll()] == [(1, None), (2, None)]


def test_bytes_between_padded_blocks_are_left_alone(engine) -> None:
    odd = engine.kv["odd"]
    padding = odd._base[:, [0, -1]].clone()
    engine.submit(1, [[3, 1]], STORE)
    engine.submit(2, [[1, 2]], LOAD, block_compute=True)
    assert torch.equal(odd._base[:, [0, -1]], padding)


def test_a_store_is_done_when_submit_returns(engine) -> None:
    engine.submit(1, [[b, b] for b in range(1, HOST_BLOCKS)], STORE)
    (result,) = engine.poll()
    block_bytes = sum(r.block_bytes for r in engine.regions)
    assert (result.job, result.direction, result.nbytes) == (1, STORE, (HOST_BLOCKS - 1) * block_bytes)
    assert result.error is None
    assert engine.poll() == []


class Gate:
    """A copy loop that waits for the test, and fails when told to."""

    def __init__(self, copy: _native.BlockCopy) -> None:
        self.copy, self.open, self.failures = copy, threading.Event(), 0

    def __call__(self, *arguments) -> None:
        assert self.open.wait(10)
        if self.failures:
            self.failures -= 1
            raise OSError("the copy failed")
        self.copy(*arguments)


@pytest.fixture
def gate(engine) -> Iterator[Gate]:
    gate = Gate(engine._backend._copy)
    engine._backend._copy = gate
    yield gate
    gate.open.set()


def test_a_load_runs_in_the_background_and_in_order(engine, gate: Gate) -> None:
    engine.submit(1, [[1, 2]], LOAD)
    engine.submit(2, [[2, 3]], LOAD)
    assert engine.poll() == []
    assert engine.pending == 2
    with pytest.raises(TimeoutError, match="load job 1"):
        engine.wait(1, 0.01)
    gate.open.set()
    engine.wait(2, 10)
    assert [r.job for r in engine.poll()] == [1, 2]
    assert engine.pending == 0


def test_a_blocking_load_comes_after_the_loads_before_it(engine, gate: Gate) -> None:
    engine.submit(1, [[1, 2]], LOAD)
    threading.Timer(0.05, gate.open.set).start()
    engine.submit(2, [[2, 3]], LOAD, block_compute=True)
    assert [r.job for r in engine.poll()] == [1, 2]


def test_a_failed_copy_is_reported_for_its_job_and_later_jobs_go_on(engine, gate: Gate) -> None:
    gate.failures = 1
    gate.open.set()
    for job, direction in ((1, STORE), (2, STORE)):
        engine.submit(job, [[1, 2]], direction)
    gate.failures = 1
    engine.submit(3, [[1, 2]], LOAD)
    engine.submit(4, [[1, 2]], LOAD, block_compute=True)
    assert [(r.job, str(r.error)) for r in engine.poll()] == [
        (1, "the copy failed"),
        (2, "None"),
        (3, "the copy failed"),
        (4, "None"),
    ]


def test_an_empty_job_is_done_at_once(engine) -> None:
    engine.submit(1, np.empty((0, 2), np.int64), LOAD)
    engine.submit(2, [], STORE)
    engine.wait(1, 10)
    assert {(r.job, r.nbytes, r.error) for r in engine.poll()} == {(1, 0, None), (2, 0, None)}


def test_job_ids_are_unique_until_reported(engine) -> None:
    engine.submit(7, [[1, 2]], STORE)
    with pytest.raises(ValueError, match="job 7 is already submitted"):
        engine.submit(7, [[1, 2]], LOAD)
    engine.poll()
    engine.submit(7, [[1, 2]], LOAD, block_compute=True)


def test_a_refused_job_leaves_nothing_behind(engine) -> None:
    with pytest.raises(ValueError, match="null block"):
        engine.submit(7, [[0, 2]], STORE)
    assert engine.pending == 0
    with pytest.raises(ValueError, match="job 7 was never submitted"):
        engine.wait(7, 0)


def test_close_waits_for_running_jobs_and_takes_no_more(engine, gate: Gate) -> None:
    engine.submit(1, [[1, 2]], LOAD)
    with pytest.raises(TimeoutError, match=r"copy jobs \[1\] still running after 0.01 s"):
        engine.close(0.01)
    with pytest.raises(RuntimeError, match="job 2: the copy engine is closed"):
        engine.submit(2, [[1, 2]], STORE)
    gate.open.set()
    engine.close(10)
    assert [r.job for r in engine.poll()] == [1]


def test_an_unknown_backend_is_refused(engine) -> None:
    with pytest.raises(ValueError, match="unknown backend 'tpu': must be one of cpu, cuda, npu"):
        CopyEngine(engine.regions, engine.pool, backend="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_cuda_backend_needs_cuda(engine) -> None:
    with pytest.raises(RuntimeError, match="needs a torch build with CUDA"):
        CopyEngine(engine.regions, engine.pool, backend="cuda")


def test_an_incompatible_helper_is_not_used(
    compile_c: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "old.c"
    source.write_text("int blockcopy_abi(void) { return 0; }\n")
    copy, name = _native.load_block_copy(compile_c(source))
    assert (copy, name) == (_native.memmove_blocks, "memmove")
    assert "ABI 0, not 4" in caplog.text


@pytest.mark.parametrize("offset", [0, 1, 40])
def test_pieces_of_every_size_are_copied_whole(copy_loop: str, offset: int) -> None:
    """Around multiples of lines and pages, from and to any address; nothing beyond a piece is touched."""
    copy, _ = cpu.load_block_copy()
    team, noise = Team(1), np.random.default_rng(0).integers(1, 255, 40_000, dtype=np.uint8)
    around = [multiple + more for multiple in (64, 512, *range(4096, 32768, 1024)) for more in (-1, 0, 1, 63)]
    for size in (1, *around):
        written = np.zeros(size + 200, np.uint8)
        region = np.array([[written.ctypes.data + offset, noise.ctypes.data + 7, 1, 1, size]], np.uint64)
        copy(region, np.zeros((1, 2), np.int64), 1, team)
        assert written[offset : offset + size].tobytes() == noise[7 : 7 + size].tobytes(), size
        assert not written[:offset].any(), size
        assert not written[offset + size :].any(), size


@given(block_bytes=st.sampled_from([3, 640, 1024, 4096, 5000]), blocks=st.integers(1, 40), data=st.data())
def test_runs_of_blocks_are_copied_whole(helper: Path, block_bytes: int, blocks: int, data: st.DataObject) -> None:
    copy, _ = _native.load_block_copy(helper)
    source = np.random.default_rng(0).integers(1, 255, (60, block_bytes), dtype=np.uint8)
    written = np.zeros((60, block_bytes), np.uint8)
    start = data.draw(st.integers(0, 60 - blocks)), data.draw(st.integers(0, 60 - blocks))
    pairs = np.arange(blocks)[:, None] + np.array(start)
    region = np.array([[written.ctypes.data, source.ctypes.data, block_bytes, block_bytes, block_bytes]], np.uint64)
    copy(region, pairs, data.draw(st.integers(1, 50)), Team(1))
    expected = np.zeros_like(written)
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    assert (written == expected).all()


def test_the_caller_waits_for_slices_that_another_thread_still_copies(helper: Path) -> None:
    wait, progress, items = ctypes.CDLL(str(helper)).blockcopy_wait, (ctypes.c_size_t * 2)(10, 9), ctypes.c_size_t(10)
    waiter = threading.Thread(target=wait, args=(progress, items), daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    progress[1] = 10
    waiter.join(10)
    assert not waiter.is_alive()


def test_import_needs_neither_torch_npu_nor_cuda_bindings() -> None:
    code = (
        "import sys, npu_copy; "
        "assert not {'torch_npu', 'cuda'} & {name.split('.')[0] for name in sys.modules}, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_job_for_a_pool_that_was_closed_first_is_refused():
    regions = find_regions({"layer": torch.zeros(10, 2, 4, 3)}, 10)
    pool = HostPool.allocate(regions, 6)
    engine = CopyEngine(regions, pool)
    pool.close()
    with pytest.raises(RuntimeError, match="host pool is closed"):
        engine.submit(1, [(1, 1)], Direction.STORE)
    engine.close()
