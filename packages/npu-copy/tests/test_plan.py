from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_copy import Direction, HostPool, find_regions
from npu_copy.plan import Planner, coalesce, split_runs

DEVICE_BLOCKS, HOST_BLOCKS = 30, 20
pairs_of_blocks = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=40, unique_by=(lambda p: p[0], lambda p: p[1])
)


def blocks_of(runs: np.ndarray) -> set[tuple[int, int]]:
    return {(s + i, d + i) for s, d, n in runs.tolist() for i in range(n)}


def by_destination(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(sorted(pairs, key=lambda p: p[1]), np.int64).reshape(-1, 2)


@given(pairs=pairs_of_blocks)
def test_runs_hold_the_same_pairs_and_are_as_few_as_can_be(pairs) -> None:
    runs = coalesce(by_destination(pairs))
    assert blocks_of(runs) == set(pairs)
    assert runs[:, 2].sum() == len(pairs)
    assert not {(s - 1, d - 1) for s, d, _ in runs.tolist()} & set(pairs)


@given(pairs=pairs_of_blocks, most=st.integers(1, 7))
def test_split_runs_hold_the_same_pairs(pairs, most) -> None:
    runs = coalesce(by_destination(pairs))
    split = split_runs(runs, most)
    assert blocks_of(split) == set(pairs)
    assert split[:, 2].sum() == len(pairs)
    assert (split[:, 2] <= most).all()


@pytest.fixture(scope="module")
def planner() -> Planner:
    kv = {"a": torch.zeros(DEVICE_BLOCKS, 8), "b": torch.zeros(DEVICE_BLOCKS, 12)[:, :7]}
    regions = find_regions(kv, DEVICE_BLOCKS)
    return Planner(regions, HostPool.allocate(regions, HOST_BLOCKS, threads=1))


@pytest.mark.parametrize("direction", Direction)
def test_pieces_are_runs_in_dense_regions_and_blocks_in_padded_ones(planner: Planner, direction: Direction) -> None:
    destinations, sources, sizes = planner.plan([[4, 8], [5, 9], [7, 2]], direction).pieces()
    assert sorted(sizes.tolist()) == [28, 28, 28, 32, 64]
    tables = planner._regions[direction].tolist()
    expected = set()
    for destination, source, destination_stride, source_stride, size in tables:
        runs = [(4, 8, 2), (7, 2, 1)] if size == 32 else [(4, 8, 1), (5, 9, 1), (7, 2, 1)]
        expected |= {(destination + d * destination_stride, source + s * source_stride, n * size) for s, d, n in runs}
    assert set(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("pairs", "direction", "message"),
    [
        ([[0, 1]], Direction.STORE, "source device block 0 is the null block"),
        ([[1, 0]], Direction.STORE, "destination host block 0 is the null block"),
        ([[30, 1]], Direction.STORE, r"source device block 30 is out of range: must be in \[1, 30\)"),
        ([[1, 20]], Direction.STORE, r"destination host block 20 is out of range: must be in \[1, 20\)"),
        ([[20, 1]], Direction.LOAD, r"source host block 20 is out of range: must be in \[1, 20\)"),
        ([[1, 30]], Direction.LOAD, r"destination device block 30 is out of range: must be in \[1, 30\)"),
        ([[-2, 1]], Direction.STORE, "source device block -2 is out of range"),
        ([[1, 3], [2, 4], [5, 3]], Direction.STORE, "destination host block 3 appears more than once"),
        ([[1, 3], [2, 3]], Direction.LOAD, "destination device block 3 appears more than once"),
        ([1, 2], Direction.STORE, r"pairs must be integers \[n, 2\], got int64 \[2\]"),
        ([[1, 2, 3]], Direction.STORE, r"got int64 \[1, 3\]"),
        ([[1.0, 2.0]], Direction.STORE, "got float64"),
        ([[1, 2]], "store", "direction must be Direction.STORE or Direction.LOAD, got 'store'"),
    ],
)
def test_bad_pairs_are_refused_by_name_and_value(planner: Planner, pairs, direction, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner.plan(pairs, direction)


def test_a_source_may_be_stored_to_two_host_blocks(planner: Planner) -> None:
    assert blocks_of(planner.plan([[5, 1], [5, 2]], Direction.STORE).runs) == {(5, 1), (5, 2)}


@pytest.mark.parametrize("order", ["C", "F"])
def test_pairs_are_in_the_order_of_their_destinations_row_by_row(planner: Planner, order) -> None:
    plan = planner.plan(np.array([[4, 8], [7, 2], [5, 9]], order=order), Direction.STORE)
    assert plan.pairs.tolist() == [[7, 2], [4, 8], [5, 9]]
    assert plan.pairs.flags.c_contiguous


def test_regions_and_pool_must_belong_together() -> None:
    one = find_regions({"a": torch.zeros(DEVICE_BLOCKS, 8)}, DEVICE_BLOCKS)
    other = find_regions({"a": torch.zeros(DEVICE_BLOCKS, 9)}, DEVICE_BLOCKS)
    with pytest.raises(ValueError, match=r"allocated for other regions: \[32\] against \[36\]"):
        Planner(other, HostPool.allocate(one, HOST_BLOCKS, threads=1))
    with pytest.raises(ValueError, match="regions is empty"):
        Planner([], HostPool.allocate(one, HOST_BLOCKS, threads=1))
