"""What travels between the scheduler side and the worker sides, once a step."""

from dataclasses import dataclass, field

import numpy as np

from offload_connector._vllm import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class CopyJob:
    """Block copies that every rank carries out and reports under one number.

    Attributes:
        job: its number, rising from 1, unique within an engine.
        pairs: int64 [n, 2], (source block, destination block).
        requests: for a load, the ids that vLLM holds in WAITING_FOR_REMOTE_KVS until every rank has finished it; empty
            for a store and for a load that runs within its step.
    """

    job: int
    pairs: np.ndarray
    requests: tuple[str, ...] = ()


@dataclass
class OffloadMetadata(KVConnectorMetadata):
    """Scheduler to workers: this step's stores and loads.

    `store` runs before any block is zeroed or written in this step; `load_now` before its forward, which waits for it;
    `load_behind` whenever the blocks are free of earlier work, and nothing but its own requests waits for it.

    `store_first`: the store must have ended before the step goes on; another machine may write its blocks in this step.
    """

    store: CopyJob | None = None
    load_now: CopyJob | None = None
    load_behind: CopyJob | None = None
    store_first: bool = False


@dataclass
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        ranks: how many ranks announce their capacity in this message; each does so once.
        capacity: usable host blocks of the smallest of these ranks.
        block_bytes: bytes of one block on the rank where it is largest.
        refusal: why a rank keeps nothing, if so.
        done: job number to the number of ranks that finished it, failed ones included.
        failed: the jobs that failed on some rank, with the error.
    """

    ranks: int = 0
    capacity: int = 0
    block_bytes: int = 0
    refusal: str | None = None
    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OffloadWorkerMetadata":
        """Join the messages of two ranks or groups of ranks."""
        assert isinstance(other, OffloadWorkerMetadata)
        announced = [message.capacity for message in (self, other) if message.ranks]
        done = dict(self.done)
        for job, count in other.done.items():
            done[job] = done.get(job, 0) + count
        return OffloadWorkerMetadata(
            ranks=self.ranks + other.ranks,
            capacity=min(announced, default=0),
            block_bytes=max(self.block_bytes, other.block_bytes),
            refusal=self.refusal or other.refusal,
            done=done,
            failed={**other.failed, **self.failed},
        )
