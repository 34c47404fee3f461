"""Pairs to runs, runs to byte spans, and the free list made of runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_mapper import byte_spans, coalesce
from block_mapper.free_runs import FreeRuns


def pieces(starts: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(50 * i + s + k, 50 * i + d + k) for i, (s, d, n) in enumerate(starts) for k in range(n)]


loose_pairs = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=60, unique=True)
run_pairs = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)), max_size=8).map(pieces)
block_pairs = loose_pairs | run_pairs


def expand(runs: np.ndarray) -> list[tuple[int, int]]:
    return [(s + i, d + i) for s, d, n in runs.tolist() for i in range(n)]


def test_runs_need_both_ids_to_rise() -> None:
    pairs = np.array([[7, 31], [4, 11], [5, 12], [6, 13], [8, 30]])
    assert coalesce(pairs).tolist() == [[4, 11, 3], [7, 31, 1], [8, 30, 1]]


def test_no_pairs_no_runs() -> None:
    assert coalesce(np.empty((0, 2), np.int64)).shape == (0, 3)


def test_pairs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\).*\[n, 2\]"):
        coalesce(np.arange(4))


@given(block_pairs)
def test_runs_hold_exactly_the_pairs_and_are_maximal(pairs: list[tuple[int, int]]) -> None:
    runs = coalesce(np.array(pairs, np.int64).reshape(-1, 2))
    assert sorted(expand(runs)) == sorted(pairs)
    # With one pair per source block, as every job has, no run can be prolonged by another.
    if len({s for s, _ in pairs}) == len(pairs):
        ends = {(s + n, d + n) for s, d, n in runs.tolist()}
        assert not ends & {(s, d) for s, d, _ in runs.tolist()}


@given(block_pairs, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_byte_spans_copy_each_block_and_nothing_between(
    pairs: list[tuple[int, int]], block_bytes: int, source_gap: int, destination_gap: int
) -> None:
    runs = coalesce(np.array(pairs, np.int64).reshape(-1, 2))
    source_stride, destination_stride = block_bytes + source_gap, block_bytes + destination_gap
    spans = byte_spans(runs, block_bytes, source_stride, destination_stride)
    moved = sorted((s + i, d + i) for s, d, n in spans.tolist() for i in range(n))
    assert moved == sorted(
        (s * source_stride + i, d * destination_stride + i) for s, d in pairs for i in range(block_bytes)
    )
    if source_gap == destination_gap == 0:
        assert len(spans) == len(runs)


def test_run_of_blocks_with_gaps_between_is_one_copy_a_block() -> None:
    run = np.array([[2, 5, 3]])
    assert byte_spans(run, 8, 8, 8).tolist() == [[16, 40, 24]]
    assert byte_spans(run, 8, 10, 8).tolist() == [[20, 40, 8], [30, 48, 8], [40, 56, 8]]


def test_byte_spans_refuse_overlapping_blocks() -> None:
    with pytest.raises(ValueError, match="block_bytes 8, source_stride 8, destination_stride 4"):
        byte_spans(np.array([[1, 1, 2]]), 8, 8, 4)


def test_free_list_takes_the_tightest_run_that_fits() -> None:
    free = FreeRuns(1, 20)
    free.take(20)
    free.put(np.array([1, 2, 3, 4, 5, 6, 8, 9, 10, 12]))
    assert free.take(3).tolist() == [8, 9, 10]
    assert free.take(1).tolist() == [12]
    assert free.take(4).tolist() == [1, 2, 3, 4]


def test_free_list_splits_over_the_longest_runs_when_none_fits() -> None:
    free = FreeRuns(1, 20)
    free.take(20)
    free.put(np.array([2, 4, 5, 9, 10, 11, 15]))
    assert free.take(4).tolist() == [4, 9, 10, 11]
    assert free.ids().tolist() == [2, 5, 15]


@given(st.data())
def test_free_list_is_a_set_of_ids(data: st.DataObject) -> None:
    size = 30
    free, model, taken = FreeRuns(1, size), set(range(1, size + 1)), set[int]()
    for _ in range(data.draw(st.integers(1, 20))):
        if data.draw(st.booleans()):
            ids = free.take(data.draw(st.integers(0, len(model)))).tolist()
            assert ids == sorted(set(ids))
            assert set(ids) <= model
            model -= set(ids)
            taken |= set(ids)
        elif taken:
            ids = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True))
            free.put(np.array(ids, np.int64))
            model |= set(ids)
            taken -= set(ids)
        free.check_integrity()
        assert free.ids().tolist() == sorted(model)
        assert free.count == len(model)
