"""The grid of the decode benchmark: what its words mean in tokens and blocks."""

import pytest

from pd_integration.bench.cells import (
    ARM_AMPLE,
    ARM_OURS,
    ARM_RESEND,
    BLOCK_TOKENS,
    GRID,
    MAX_NUM_SEQS,
    PD,
    Cell,
    Source,
)

CELLS = [*GRID, *PD]


@pytest.mark.parametrize("cell", CELLS)
def test_requests_are_the_same_each_time_and_of_the_stated_mean(cell: Cell) -> None:
    assert cell.lengths() == cell.lengths()
    assert [len(prompt) for prompt in cell.prompts()] == [prompt for prompt, _ in cell.lengths()]
    assert sum(prompt for prompt, _ in cell.lengths()) / cell.requests == pytest.approx(cell.prompt, rel=0.1)


@pytest.mark.parametrize("cell", CELLS)
def test_more_requests_than_can_be_there_at_once(cell: Cell) -> None:
    assert cell.requests > MAX_NUM_SEQS


@pytest.mark.parametrize("cell", CELLS)
def test_pressure_is_demand_over_capacity(cell: Cell) -> None:
    demand = MAX_NUM_SEQS * sum(map(sum, cell.lengths())) / cell.requests
    assert demand / (cell.blocks(cell.pressure) * BLOCK_TOKENS) == pytest.approx(cell.pressure, rel=0.05)


@pytest.mark.parametrize("cell", CELLS)
def test_longest_request_fits_alone(cell: Cell) -> None:
    assert (cell.blocks(cell.pressure) - 1) * BLOCK_TOKENS >= cell.longest


@pytest.mark.parametrize("cell", CELLS)
def test_ample_holds_whoever_may_run_at_its_longest(cell: Cell) -> None:
    longest = sorted((prompt + output for prompt, output in cell.lengths()), reverse=True)[:MAX_NUM_SEQS]
    assert (cell.decode_blocks(ARM_AMPLE) - 1) * BLOCK_TOKENS > sum(longest)
    assert cell.decode_blocks(ARM_OURS) == cell.blocks(cell.pressure)


def test_only_with_prefill_a_request_can_be_sent_there_again() -> None:
    assert ARM_RESEND in Cell(1024, 2.0, Source.PREFILL).arms()
    assert ARM_RESEND not in Cell(1024, 2.0).arms()


def test_every_prompt_length_meets_every_pressure() -> None:
    assert {(cell.prompt, cell.pressure) for cell in GRID} == {(p, x) for p in (256, 1024, 4096) for x in (1.25, 2, 4)}
