"""Where a request with draft slots can resume, from what the scheduler sees of it."""

from types import SimpleNamespace

import pytest

from offload_connector.last_steps import LastSteps

BLOCK = 100


class Run:
    """A request that is scheduled and grows as an engine with three drafts would have it."""

    def __init__(self, prompt=10):
        self.steps = LastSteps(BLOCK)
        self.request = SimpleNamespace(request_id="r", num_tokens=prompt)
        self.computed = 0
        self.steps.admit(self.request)

    def schedule(self, count, drafts=0):
        spec = {"r": [-1] * drafts} if drafts else {}
        self.steps.note_scheduled(SimpleNamespace(num_scheduled_tokens={"r": count}, scheduled_spec_decode_tokens=spec))
        self.computed += count
        return drafts

    def output(self, drafts, accepted):
        self.computed -= drafts - accepted
        self.request.num_tokens += accepted + 1
        self.steps.note_output()


def test_after_a_prefill_chunk_everything_computed_counts():
    run = Run(prompt=50)
    run.schedule(20)
    run.steps.note_output()
    assert run.steps.resume_point("r", 20) == (20, 20)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_after_a_step_with_drafts_the_state_before_them_counts(accepted):
    run = Run(prompt=10)
    run.schedule(10)
    run.output(0, 0)
    drafts = run.schedule(4, drafts=3)
    run.output(drafts, accepted)
    assert run.computed == 11 + accepted
    assert run.steps.resume_point("r", run.computed) == (11, 14)


def test_overlapping_steps_each_count_their_own_tokens():
    """Async scheduling: the next step is scheduled before the output of the last one is known."""
    run = Run(prompt=10)
    run.schedule(10)
    run.output(0, 0)
    first = run.schedule(4, drafts=3)
    second = run.schedule(4, drafts=3)
    run.output(first, accepted=2)
    run.output(second, accepted=1)
    # 10 of the prompt, then 1 + 2 and 1 + 1 tokens.
    assert run.computed == 15
    assert run.steps.resume_point("r", run.computed) == (14, 17)


def test_a_step_without_drafts_after_one_with():
    run = Run(prompt=10)
    run.schedule(10)
    run.output(0, 0)
    run.output(run.schedule(4, drafts=3), accepted=3)
    run.output(run.schedule(1), accepted=0)
    assert run.steps.resume_point("r", run.computed) == (run.computed, run.computed)


def test_admitted_again_it_starts_anew():
    run = Run(prompt=10)
    run.schedule(10)
    run.output(0, 0)
    run.output(run.schedule(4, drafts=3), accepted=3)
    run.steps.forget("r")
    run.steps.admit(run.request)
    run.schedule(5)
    run.steps.note_output()
    assert run.steps.resume_point("r", 5) == (5, 5)
