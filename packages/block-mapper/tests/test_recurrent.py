"""Recurrent state with draft tokens: a resumed request must read the state after exactly the tokens it says.

The worker below is a model of vLLM's (vllm/v1/worker/mamba_utils.py): slot j of a step's running column holds the
temporal state after the step's first token and j drafts; the convolution state holds all of them in the first slot and
is read shifted by the accepted drafts. Contents are token counts, so a wrong state shows as a wrong number.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_mapper import GroupKind, HostPool, KVGroup, SavedRequests, UnsupportedGroup, recurrent_resume_point

Block = dict[str, int]
ALIGN, NONE = True, False


@dataclass
class Worker:
    """One request. align: a column per block of tokens (prefix caching on); else one column for all tokens."""

    block_size: int
    drafts_at_most: int
    align: bool
    computed: int = 0
    columns: list[Block | None] = field(default_factory=list)
    accepted: int = 1
    running: int | None = None
    last_step: tuple[int, int, int] = (0, 0, 0)

    def column(self, end: int) -> int:
        return -(-end // self.block_size) - 1 if self.align else 0

    def read(self, column: int, bias: int) -> Block:
        first, slot = self.columns[column], self.columns[column + bias]
        assert first is not None
        assert slot is not None
        return {"temporal": slot["temporal"], "convolution": first["convolution"] + bias}

    def step(self, new_tokens: int, drafts: int, accepted_drafts: int) -> None:
        end = self.computed + new_tokens + drafts
        target = self.column(end)
        while len(self.columns) <= target + self.drafts_at_most:
            self.columns.append({"temporal": -1, "convolution": -1})
        if self.align:
            for column in range(max(0, (self.computed - 1) // self.block_size)):
                self.columns[column] = None
        if self.computed:
            source = self.column(self.computed) if self.running is None else self.running
            state = self.read(source, self.accepted - 1)
            assert state == {"temporal": self.computed, "convolution": self.computed}, "the step read a wrong state"
        first_slot = self.computed + new_tokens
        for j in range(drafts + 1):
            self.columns[target + j] = {"temporal": first_slot + j, "convolution": first_slot if j == 0 else -1}
        self.last_step = (self.computed, new_tokens + drafts, drafts)
        self.computed, self.accepted, self.running = first_slot + accepted_drafts, accepted_drafts + 1, target
        aligned = self.computed // self.block_size * self.block_size
        if self.align and aligned >= first_slot:
            self.columns[aligned // self.block_size - 1] = self.read(target, aligned - first_slot)
            if aligned // self.block_size - 1 == target:
                self.accepted = 1

    def preempt_and_resume(self) -> None:
        num_tokens, last_step_end = recurrent_resume_point(*self.last_step, self.computed, self.block_size)
        group = KVGroup(GroupKind.RECURRENT, self.block_size, speculative_blocks=self.drafts_at_most)
        saved = SavedRequests(HostPool(4), [group])
        table = [0 if block is None else 100 + i for i, block in enumerate(self.columns)]
        stored = saved.save("a", [table], num_tokens, job=0, last_step_end=last_step_end)
        saved.report(0)
        host = {h: dict(self.columns[d - 100] or {}) for d, h in stored.tolist()}
        positions = self.column(num_tokens) + 1
        new_table = [0] * (positions - 1) + [200 + i for i in range(1 + self.drafts_at_most)]
        loaded = saved.load("a", [new_table], num_tokens, job=1)
        assert len(stored) == len(loaded) == 1, "one block holds all of the state"
        self.columns = [None] * (positions - 1) + [
            {"temporal": -1, "convolution": -1} for _ in new_table[positions - 1 :]
        ]
        for h, d in loaded.tolist():
            self.columns[positions - 1 + d - 200] = host[h]
        self.computed, self.accepted, self.running = num_tokens, 1, None


@settings(max_examples=400)
@given(
    align=st.sampled_from([ALIGN, NONE]),
    block_size=st.integers(2, 5),
    drafts_at_most=st.integers(0, 3),
    prompt=st.integers(1, 8),
    data=st.data(),
)
def test_every_resume_reads_the_right_state(
    align: bool, block_size: int, drafts_at_most: int, prompt: int, data: st.DataObject
) -> None:
    worker = Worker(block_size if align else 10_000, drafts_at_most, align)
    worker.step(prompt, 0, 0)
    for _ in range(data.draw(st.integers(1, 8))):
        drafts = data.draw(st.integers(0, drafts_at_most))
        worker.step(1, drafts, data.draw(st.integers(0, drafts)))
        if data.draw(st.booleans()):
            before = worker.computed
            worker.preempt_and_resume()
            assert before - drafts_at_most <= worker.computed <= before
    worker.step(1, 0, 0)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_drafts_that_reach_into_the_next_block(prompt: int, accepted: int) -> None:
    worker = Worker(4, 3, ALIGN)
    worker.step(prompt, 0, 0)
    worker.step(1, 3, accepted)
    worker.preempt_and_resume()
    worker.step(1, 3, 0)


def test_without_drafts_nothing_is_computed_again() -> None:
    assert recurrent_resume_point(10, 1, 0, 11, 16) == (11, 11)


def test_accepted_drafts_are_computed_again() -> None:
    assert recurrent_resume_point(10, 4, 3, 13, 16) == (11, 14)


def test_all_drafts_accepted_up_to_a_block_boundary_are_kept() -> None:
    assert recurrent_resume_point(12, 4, 3, 16, 16) == (16, 16)


@pytest.mark.parametrize("step", [(10, 4, 3, 10), (10, 4, 3, 15), (10, 2, 2, 12), (10, 2, -1, 12)])
def test_impossible_steps_are_refused(step: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"computed_now is {step[3]}: a step from 10"):
        recurrent_resume_point(*step, block_size=16)


def test_speculative_blocks_without_the_end_of_the_last_step_are_refused() -> None:
    pool = HostPool(4)
    saved = SavedRequests(pool, [KVGroup(GroupKind.RECURRENT, 16, speculative_blocks=2)])
    with pytest.raises(ValueError, match="last_step_end is missing: a recurrent group"):
        saved.save("a", [[5, 6, 7]], 10, job=0)
    with pytest.raises(ValueError, match="last_step_end is 9"):
        saved.save("a", [[5, 6, 7]], 10, job=0, last_step_end=9)
    assert "a" not in saved
    assert saved.open_jobs() == ()


def test_state_that_is_gone_is_refused() -> None:
    saved = SavedRequests(HostPool(4), [KVGroup(GroupKind.RECURRENT, 4)])
    with pytest.raises(UnsupportedGroup, match="recurrent block table of 3 positions has no block at position 2"):
        saved.save("a", [[0, 8, 0]], 10, job=0)


def test_only_the_running_state_of_an_aligned_table_is_kept_in_its_place() -> None:
    saved = SavedRequests(HostPool(4), [KVGroup(GroupKind.RECURRENT, 4)])
    assert saved.save("a", [[0, 8, 9]], 10, job=0).tolist() == [[9, 1]]
    assert saved.host_tables("a")[0].tolist() == [0, 0, 1]
    saved.report(0)
    assert [saved.restorable_tokens("a", n) for n in (9, 10, 11)] == [0, 10, 10]
    assert saved.load("a", [[0, 0, 30, 31]], 10, job=1).tolist() == [[1, 30]]
