"""Read a step trace (see `step_trace`) and say what it proves: tokens computed again, preemptions, lanes over time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from pd_integration.step_trace import GONE

WAITING, QUEUED, RUNNING, RECOMPUTING = "waiting for Prefill", "queued at Decode", "running", "recomputing"
PREEMPTED, ON_HOST, LOADING = "preempted", "KV on host", "loading"
LANE_KINDS = (WAITING, QUEUED, RUNNING, RECOMPUTING, PREEMPTED, ON_HOST, LOADING)


@dataclass(frozen=True)
class Step:
    """One line of a trace; `step_trace` explains the fields."""

    t: float
    step: int
    tokens: dict[str, list[int]]
    preempted: list[str]
    status: dict[str, str]
    running: int
    waiting: int
    usage: float


@dataclass(frozen=True)
class Segment:
    """A stretch of a request's life: one of `LANE_KINDS`, from ``start`` to ``end`` in seconds since the epoch."""

    kind: str
    start: float
    end: float


@dataclass
class Preemption:
    """One preemption and how it ended. Counts are in tokens."""

    request: str
    time: float
    computed: int
    """Positions the engine had computed or loaded until then."""
    resumed_at: int | None = None
    """Position where computing went on; None if the request never ran again."""

    @property
    def recomputed(self) -> int:
        """Tokens to compute again because of this preemption."""
        return 0 if self.resumed_at is None else max(0, self.computed - self.resumed_at)

    @property
    def restored(self) -> bool:
        """Whether the request went on without computing any token again."""
        return self.resumed_at is not None and self.recomputed == 0


@dataclass
class History:
    """What a trace says about one request."""

    high_water: int = 0
    """Positions below this one have been computed, or loaded, at least once."""
    recomputed: int = 0
    """Scheduled tokens at positions below the high-water mark of their time."""
    preemptions: list[Preemption] = field(default_factory=list)
    lane: list[Segment] = field(default_factory=list)


def read_trace(path: Path) -> list[Step]:
    """Parse the trace at ``path``. A last line that was cut off by the end of the process is left out."""
    steps = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            steps.append(Step(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}:{number} is not a line of a step trace: {error}") from error
    return steps


def histories(steps: list[Step]) -> dict[str, History]:
    """The history of every request in ``steps``, by its internal id, in order of arrival."""
    builders: dict[str, _Builder] = {}
    for step in steps:
        for req_id in step.status.keys() | step.tokens.keys() | set(step.preempted):
            builder = builders.setdefault(req_id, _Builder(req_id, step.t))
            builder.add(step)
    end = steps[-1].t if steps else 0.0
    return {req_id: builder.finish(end) for req_id, builder in builders.items()}


class _Builder:
    """Follows one request through the steps."""

    def __init__(self, req_id: str, t: float) -> None:
        self.req_id = req_id
        self.history = History()
        self.kind = WAITING
        self.since = t
        self.open: Preemption | None = None

    def add(self, step: Step) -> None:
        if self.req_id in step.preempted:
            self.open = Preemption(self.req_id, step.t, self.history.high_water)
            self.history.preemptions.append(self.open)
            self._enter(PREEMPTED, step.t)
        if self.req_id in step.tokens:
            self._computed(step)
        elif (status := step.status.get(self.req_id)) is not None:
            if status == GONE:
                self._enter(GONE, step.t)
            elif status == "WAITING":
                self._enter(QUEUED, step.t)
            elif status == "WAITING_FOR_REMOTE_KVS":
                self._enter(WAITING if self.open is None else LOADING, step.t)

    def _computed(self, step: Step) -> None:
        start, count, drafts = step.tokens[self.req_id]
        history = self.history
        again = max(0, min(start + count, history.high_water) - start)
        history.recomputed += again
        # A draft may be rejected, and its position is then computed again for a good reason.
        history.high_water = max(history.high_water, start, start + count - drafts)
        if self.open is not None:
            self.open.resumed_at = start
            if self.open.restored:
                self._rename_wait()
            self.open = None
        self._enter(RECOMPUTING if again else RUNNING, step.t)

    def _rename_wait(self) -> None:
        """The wait since the preemption turned out to be one with the KV on the host."""
        assert self.open is not None
        lane = self.history.lane
        lane[:] = [
            Segment(ON_HOST, seg.start, seg.end) if seg.kind == PREEMPTED and seg.start >= self.open.time else seg
            for seg in lane
        ]
        if self.kind == PREEMPTED:
            self.kind = ON_HOST

    def _enter(self, kind: str, t: float) -> None:
        if kind == self.kind:
            return
        if self.kind != GONE and t > self.since:
            self.history.lane.append(Segment(self.kind, self.since, t))
        self.kind, self.since = kind, t

    def finish(self, end: float) -> History:
        self._enter(GONE, end)
        return self.history
