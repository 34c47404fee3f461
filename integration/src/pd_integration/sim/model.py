"""The model as the workers see it: which tokens of which requests each step computes, and what it samples.

All ranks carry out the same plan; this is the part of vLLM's V1 model runner that every rank repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from pd_integration.sim.errors import Violation
from pd_integration.sim.recurrent import StateMove, StateTracker
from pd_integration.sim.tokens import Text


@dataclass
class Row:
    """One request in one step: positions start..end are computed, the last `drafts` of them for draft tokens.

    tables: block table per KV cache group as of this step. accepted: right drafts. samples: whether tokens come out:
    those at positions end - drafts .. end - drafts + accepted. state: how the recurrent state goes on, if there is one.
    """

    text: Text
    tables: list[list[int]]
    start: int
    end: int
    drafts: int = 0
    accepted: int = 0
    samples: bool = False
    state: StateMove | None = None

    @property
    def accepted_end(self) -> int:
        """One past the last position whose KV belongs to a token of the request."""
        return self.end - self.drafts + self.accepted

    @property
    def sampled(self) -> list[int]:
        first = self.end - self.drafts
        return self.text.tokens[first : first + self.accepted + 1] if self.samples else []


@dataclass
class StepPlan:
    """A step on its way through the workers. poisoned: requests whose forward read KV of a failed load."""

    number: int
    scheduled: SchedulerOutput
    epoch: int
    rows: list[Row] = field(default_factory=list)
    poisoned: set[str] = field(default_factory=set)


@dataclass
class _State:
    text: Text
    known: int
    tables: list[list[int]]


class Model:
    """Follows the scheduler's outputs as the workers do.

    Args:
        random: decides which drafts are right.
        num_drafts: most drafts a step, vLLM's num_speculative_tokens.
        fixed_drafts: always as many, as a draft model proposes; else any number, as n-gram lookup does.
        asynchronous: drafts stay with the workers, as with async scheduling.
        states: where recurrent states lie, for models that have them.
    """

    def __init__(
        self,
        random: Random,
        num_drafts: int,
        fixed_drafts: bool,
        asynchronous: bool,
        states: StateTracker | None = None,
    ) -> None:
        self._recurrent = states
        self._random = random
        self._num_drafts = num_drafts
        self._fixed_drafts = fixed_drafts
        self._asynchronous = asynchronous
        self._states: dict[str, _State] = {}
        self._drafts: dict[str, list[int]] = {}
        self.texts: dict[str, Text] = {}
        self.epoch = 0
        """Changes with the model's weights: KV of another epoch is worthless."""
        self.steps = 0

    def plan(self, scheduled: SchedulerOutput, in_flight: Iterable[StepPlan]) -> StepPlan:
        """Plan a step that was scheduled before the outputs of the steps in flight were known."""
        self.steps += 1
        plan = StepPlan(self.steps, scheduled, self.epoch)
        if self._recurrent is not None:
            preempted = scheduled.preempted_req_ids or set()
            for request_id in (
                *scheduled.finished_req_ids,
                *preempted,
                *scheduled.scheduled_cached_reqs.resumed_req_ids,
            ):
                self._recurrent.forget(request_id)
        for request_id in scheduled.finished_req_ids:
            self._states.pop(request_id, None)
            self._drafts.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            text = self.texts[new.req_id]
            known = len(new.prompt_token_ids or ())
            self._states[new.req_id] = _State(text, known, [list(ids) for ids in new.block_ids])
            plan.rows.append(self._row(scheduled, new.req_id, new.num_computed_tokens))
        cached = scheduled.scheduled_cached_reqs
        flying = list(in_flight)
        for index, request_id in enumerate(cached.req_ids):
            plan.rows.append(self._row(scheduled, request_id, self._update(cached, index, flying)))
        return plan

    def _update(self, cached: CachedRequestData, index: int, in_flight: list[StepPlan]) -> int:
        """Take over what the scheduler says of a known request; return the position where it goes on."""
        request_id = cached.req_ids[index]
        state = self._states[request_id]
        new_blocks = cached.new_block_ids[index]
        start = cached.num_computed_tokens[index]
        told = state.text.num_prompt + cached.num_output_tokens[index]
        if request_id in cached.resumed_req_ids:
            assert new_blocks is not None
            state.tables = [list(ids) for ids in new_blocks]
            state.known = told
            self._drafts.pop(request_id, None)
            return start
        for table, ids in zip(state.tables, new_blocks or [[] for _ in state.tables], strict=True):
            table.extend(ids)
        # The scheduler took all drafts in flight for accepted; the workers know better.
        rows = [row for plan in in_flight for row in plan.rows if row.text.request_id == request_id]
        state.known = min(state.known, told)
        return start - sum(row.drafts - row.accepted for row in rows if row.samples)

    def _row(self, scheduled: SchedulerOutput, request_id: str, start: int) -> Row:
        state = self._states[request_id]
        end = start + scheduled.num_scheduled_tokens[request_id]
        drafts = self._scheduled_drafts(scheduled, request_id)
        row = Row(state.text, [list(table) for table in state.tables], start, end, len(drafts))
        first = end - len(drafts)
        if first > state.known:
            raise Violation(
                "tokens out of nothing",
                f"{request_id} is scheduled up to position {first}, but has {state.known} tokens "
                f"(from {start}, {len(drafts)} drafts)",
            )
        row.samples = first == state.known
        if row.samples:
            while row.accepted < len(drafts) and drafts[row.accepted] == state.text.tokens[first + row.accepted]:
                row.accepted += 1
            state.known = first + row.accepted + 1
            self._draft(request_id, state)
        if self._recurrent is not None:
            row.state = self._recurrent.move(request_id, start, end, row.drafts, row.accepted)
        return row

    def _scheduled_drafts(self, scheduled: SchedulerOutput, request_id: str) -> list[int]:
        drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
        if self._asynchronous:
            own = self._drafts.get(request_id, [])
            return [own[i] if i < len(own) else -1 for i in range(len(drafts))]
        return list(drafts)

    def _draft(self, request_id: str, state: _State) -> None:
        if not self._num_drafts:
            return
        count = self._num_drafts if self._fixed_drafts else self._random.randint(0, self._num_drafts)
        right = self._random.choice((0, 1, self._num_drafts))
        self._drafts[request_id] = [state.text.draft(state.known + i, i < right) for i in range(count)]

    def take_drafts(self, plan: StepPlan) -> DraftTokenIds:
        """What the workers propose after a step, for the scheduler."""
        ids = [row.text.request_id for row in plan.rows if row.samples]
        return DraftTokenIds(ids, [list(self._drafts.get(request_id, [])) for request_id in ids])
