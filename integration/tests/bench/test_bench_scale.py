"""The scale model's arithmetic, and short runs of it in virtual time."""

import pytest
import tomllib

from pd_integration.bench.scale import (
    INPUTS,
    Preempted,
    Run,
    Setup,
    fallback_share,
    least_blocks,
    simulate,
    summary,
)


def inputs(**model) -> dict:
    return {
        "machine": {
            "cards": 4,
            "hbm_bytes": 100e6,
            "hbm_bytes_per_s": 1e9,
            "memory_utilization": 0.9,
            "host_link_bytes_per_s": 1e8,
            "step_overhead_s": 0.01,
        },
        "traffic": {
            "requests": 32,
            "prompt_tokens": [300, 500],
            "output_tokens": [100, 600],
            "hours": 0.01,
            "seed": 0,
        },
        "engine": {"block_tokens": 16, "max_num_seqs": 8},
        "models": [
            {
                "name": "small",
                "cards_per_engine": 2,
                "weight_bytes_per_card": 50e6,
                "kv_bytes_per_token": 12500,
                "state_bytes_per_request": 0,
                **model,
            }
        ],
    }


def setup(**model) -> Setup:
    made = inputs(**model)
    return Setup.of(made, made["models"][0])


def test_sizes_follow_from_the_inputs() -> None:
    made = setup()
    assert made.block_bytes == 16 * 12500
    assert made.blocks == 200  # 40 of 100 MB are left
    assert made.requests == 16  # 32 over two engines
    assert made.step_seconds(1600) == pytest.approx(0.01 + (50e6 + 20e6) / 1e9)
    assert made.copy_seconds(10) == pytest.approx(0.02)


def test_recurrent_state_counts_as_tokens_of_the_prompt() -> None:
    made = setup(state_bytes_per_request=125000)
    assert made.state_tokens == 10
    assert made.spans() == ((310, 510), (100, 600))


def test_weights_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"small: .* less than a block"):
        setup(weight_bytes_per_card=89.9e6)


# The host holds 0, 10, 25 and 0 blocks when requests of 10, 15, 20 and 30 blocks are preempted.
PREEMPTED = [Preempted(0.0, 10, 0, True), Preempted(1.0, 15, 10, True), Preempted(2.0, 20, 25, True)]
PREEMPTED += [Preempted(3.0, 30, 0, True)]


@pytest.mark.parametrize(("blocks", "share"), [(45, 0.0), (44, 0.25), (25, 0.5), (9, 1.0)])
def test_share_of_fallbacks_with_a_budget(blocks: int, share: float) -> None:
    assert fallback_share(PREEMPTED, blocks) == share


def test_least_budget_keeps_fallbacks_at_the_share_wanted() -> None:
    for share in (0.0, 0.25, 0.5, 0.75):
        least = least_blocks(PREEMPTED, share)
        assert fallback_share(PREEMPTED, least) <= share < fallback_share(PREEMPTED, least - 1)
    assert least_blocks([], 0.01) == 0


def test_summary_is_per_second_and_per_preemption() -> None:
    events = [Preempted(0.0, 50, 0, True, 2.0), Preempted(1.0, 50, 50, False, 4.0)]
    run = Run(10.0, 500, stored_blocks=100, loaded_blocks=50, link_busy_s=1.0, stalled_s=0.5, preempted=events)
    found = summary(setup(), run)
    assert found["tokens/s of the engine"] == 50
    assert found["preemptions an hour"] == 720
    assert found["fallbacks"] == 0.5
    assert found["to next token s"] == 3.0
    assert found["GB stored a preemption"] == pytest.approx(0.01)
    assert found["host link GB/s used"] == pytest.approx(0.003)
    assert (found["link busy"], found["forward held up"]) == (0.1, 0.05)


def test_virtual_minute_with_room_on_the_host_restores_everybody() -> None:
    run = simulate(setup(), 1000, 1 / 60)
    assert run.seconds >= 60
    assert len(run.preempted) > 5
    assert all(event.kept for event in run.preempted)
    assert run.stored_blocks >= run.loaded_blocks > 0
    assert run.link_busy_s == pytest.approx(setup().copy_seconds(run.stored_blocks + run.loaded_blocks))


def test_virtual_minute_without_room_keeps_nobody() -> None:
    run = simulate(setup(), 1, 1 / 60)
    assert run.preempted
    assert not any(event.kept for event in run.preempted)
    assert run.stored_blocks == run.loaded_blocks == 0


def test_same_inputs_give_the_same_run() -> None:
    assert simulate(setup(), 1000, 1 / 120) == simulate(setup(), 1000, 1 / 120)


def test_recompute_keeps_nothing() -> None:
    run = simulate(setup(), 1000, 1 / 60, ours=False)
    assert run.preempted
    assert run.stored_blocks == 0
    assert not any(event.kept for event in run.preempted)


def test_inputs_of_the_repository_are_complete() -> None:
    found = tomllib.loads(INPUTS.read_text(encoding="utf-8"))
    for chosen in found["models"]:
        made = Setup.of(found, chosen)
        assert made.blocks * made.block_tokens > sum(most for _, most in made.spans())
