"""Jobs in the making: what the requests of one step add to its store and its loads."""

from dataclasses import dataclass, field

import numpy as np

from offload_connector.metadata import CopyJob, OffloadMetadata

STORE, LOAD_NOW, LOAD_BEHIND = "store", "load_now", "load_behind"
"""The kinds of job, named as the fields of OffloadMetadata; at most one of each a step."""


@dataclass
class _Plan:
    job: int
    pairs: list[np.ndarray] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Plans:
    """Numbers the jobs of an engine and collects their copies step by step.

    Attributes:
        open_jobs: jobs handed out that not every rank has reported yet.
    """

    def __init__(self) -> None:
        self.open_jobs: set[int] = set()
        self._last_job = 0
        self._plans: dict[str, _Plan] = {}
        self._store_first = False

    def job(self, kind: str) -> int:
        """Return the number of this step's job of `kind`; nothing is planned by asking."""
        plan = self._plans.get(kind)
        return plan.job if plan is not None else self._last_job + 1

    def add(self, kind: str, req_id: str, pairs: np.ndarray) -> None:
        """Add a request's copies, int64 [n, 2] (source block, destination block); n may be 0."""
        plan = self._plans.get(kind)
        if plan is None:
            self._last_job += 1
            plan = self._plans[kind] = _Plan(self._last_job)
        plan.pairs.append(pairs)
        plan.requests.append(req_id)

    def store_first(self) -> None:
        """This step's store must have ended before anything else of the step begins."""
        self._store_first = True

    def take(self) -> OffloadMetadata:
        """Hand out the jobs planned since the last call."""
        if not self._plans:
            return OffloadMetadata()
        jobs = {}
        for kind, plan in self._plans.items():
            requests = tuple(plan.requests) if kind == LOAD_BEHIND else ()
            jobs[kind] = CopyJob(plan.job, np.concatenate(plan.pairs), requests)
            self.open_jobs.add(plan.job)
        store_first, self._store_first = self._store_first, False
        self._plans = {}
        return OffloadMetadata(**jobs, store_first=store_first)
