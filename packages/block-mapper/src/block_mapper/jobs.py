"""Copy jobs: the stores or the loads of one step, done once every rank has reported."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from block_mapper.pool import HostPool
from block_mapper.runs import Int64Array

_NO_JOB = -1


class IllegalEvent(RuntimeError):
    """An event that the state of the request or job does not allow: the caller's bookkeeping is wrong."""


@dataclass
class Job:
    """blocks: the host blocks it reads or writes, one reference each. req_ids: saved requests that wait for it."""

    is_load: bool
    reports: int = 0
    failed: bool = False
    blocks: list[Int64Array] = field(default_factory=list)
    req_ids: dict[str, None] = field(default_factory=dict)


class Jobs:
    """The open jobs. Each holds a reference to its host blocks until the last of world_size ranks has reported it,
    so no block returns to the pool, whatever became of its request, while a copy still touches it."""

    def __init__(self, pool: HostPool, world_size: int):
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: give the number of ranks that report a job, at least 1")
        self.pool = pool
        self.world_size = world_size
        self.open: dict[int, Job] = {}
        self._writer: Int64Array = np.full(pool.num_blocks + 1, _NO_JOB, np.int64)

    def check_takes(self, number: int, is_load: bool) -> None:
        """Raise unless copies of this direction can be added to job number."""
        if number < 0:
            raise ValueError(f"job is {number}: number jobs from 0 up")
        job = self.open.get(number)
        if job and job.is_load != is_load:
            raise IllegalEvent(f"job {number} is a {'load' if job.is_load else 'store'} job: use another number")
        if job and job.reports:
            raise IllegalEvent(f"job {number} has been reported by {job.reports} ranks: use another number")

    def add(self, number: int, is_load: bool, blocks: Int64Array) -> None:
        """Add copies to or from blocks, which the caller holds, to a job that takes them; opens it if need be."""
        self.pool.retain(blocks)
        self.open.setdefault(number, Job(is_load)).blocks.append(blocks)
        if not is_load:
            self._writer[blocks] = number

    def writing(self, blocks: Int64Array) -> set[int]:
        """The open store jobs that write any of blocks."""
        return set(self._writer[blocks].tolist()) - {_NO_JOB}

    def held(self) -> list[Int64Array]:
        """Host blocks of all open jobs, one array per reference."""
        return [blocks for job in self.open.values() for blocks in job.blocks]

    def report(self, number: int, count: int, failed: bool) -> Job | None:
        """count more ranks are done with the job, failed if any of them failed. The job, once all are, else None."""
        job = self.open.get(number)
        if job is None:
            raise IllegalEvent(f"job {number} is not open: never started, or reported by all ranks already")
        if not 1 <= count <= self.world_size - job.reports:
            raise IllegalEvent(
                f"{count} more reports of job {number}: {job.reports} of {self.world_size} ranks have reported"
            )
        job.reports += count
        job.failed |= failed
        if job.reports < self.world_size:
            return None
        del self.open[number]
        for blocks in job.blocks:
            if not job.is_load:
                self._writer[blocks] = _NO_JOB
                if job.failed:
                    self.pool.unpublish(blocks)
            self.pool.free(blocks)
        return job
