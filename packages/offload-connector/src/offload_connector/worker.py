"""The worker side: one rank's host memory and its block copies."""

import torch

from npu_copy import CopyEngine, CopyResult, Direction, HostPool, UnsupportedLayout, find_regions
from offload_connector._vllm import KVCacheConfig, init_logger
from offload_connector.config import PER_RANK, OffloadConfig
from offload_connector.metadata import CopyJob, OffloadMetadata, OffloadWorkerMetadata
from offload_connector.metrics import OffloadStats

logger = init_logger("vllm.offload_connector")

COPY_TIMEOUT = 120.0
"""Seconds after which a copy that does not end is an error: at 1 GB/s, the slowest host link, these are 120 GB."""


class OffloadWorker:
    """Carries out the jobs of the scheduler side on this rank.

    Args:
        config: the operator's settings.
        kv_cache_config: vLLM's; its num_blocks is the number of device blocks.
    """

    def __init__(self, config: OffloadConfig, kv_cache_config: KVCacheConfig) -> None:
        self._stats = OffloadStats()
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._host: HostPool | None = None
        self._engine: CopyEngine | None = None
        self._report = OffloadWorkerMetadata()
        self._waiting: dict[int, tuple[str, ...]] = {}
        self._open_stores: list[int] = []
        self._within_step: dict[int, CopyJob] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]]) -> None:
        """Take vLLM's KV cache tensors, by layer name, and the host memory of the budget.

        A layout that cannot be proved is no error: this rank says so, and the scheduler side keeps nothing.

        Raises:
            ValueError: the budget holds not even one block.
            npu_copy.InsufficientHostMemory: the host has less memory than the budget.
        """
        num_blocks = self._kv_cache_config.num_blocks
        try:
            regions = find_regions(kv_caches, num_blocks)
        except UnsupportedLayout as refusal:
            logger.warning("Recompute offload is off on this rank: %s", refusal)
            self._report = OffloadWorkerMetadata(ranks=1, refusal=str(refusal))
            return
        block_bytes = sum(region.block_bytes for region in regions)
        capacity = self._config.cpu_bytes_per_rank // block_bytes
        if capacity < 1:
            raise ValueError(
                f"RecomputeCPUOffloadConnector: {PER_RANK} gives {self._config.cpu_bytes_per_rank} bytes, but a block "
                f"of this model takes {block_bytes} on each rank; give at least that, better the blocks of all requests "
                "that you expect to be preempted at once"
            )
        # Host block 0 mirrors the null block and is never touched, so its pages cost no memory.
        self._host = HostPool.allocate(regions, capacity + 1)
        self._engine = CopyEngine(regions, self._host)
        self._report = OffloadWorkerMetadata(ranks=1, capacity=capacity, block_bytes=block_bytes)
        logger.info(
            "Recompute offload: %d host blocks of %d bytes (%.2f GiB) on this rank, %d memory regions",
            capacity,
            block_bytes,
            capacity * block_bytes / (1 << 30),
            len(regions),
        )

    def store(self, metadata: OffloadMetadata) -> None:
        """Start this step's store; called before anything of the step touches a device block."""
        if self._engine is None:
            return
        # A connector beside this one may let another machine write into freed blocks, in no order with our streams.
        # Blocks freed in an earlier step may be written that way from now on, so their stores must have ended.
        for job in self._open_stores:
            self._engine.wait(job, COPY_TIMEOUT)
        if metadata.store is not None:
            self._engine.submit(metadata.store.job, metadata.store.pairs, Direction.STORE)
            self._open_stores.append(metadata.store.job)

    def load(self, metadata: OffloadMetadata) -> None:
        """Start this step's loads; called before the forward if `load_now` is there, else at any time in the step."""
        if self._engine is None:
            return
        if (now := metadata.load_now) is not None:
            self._within_step[now.job] = now
            self._engine.submit(now.job, now.pairs, Direction.LOAD, block_compute=True)
        if (behind := metadata.load_behind) is not None:
            self._waiting[behind.job] = behind.requests
            self._engine.submit(behind.job, behind.pairs, Direction.LOAD)

    def _poll(self) -> None:
        if self._engine is None:
            return
        for result in self._engine.poll():
            self._note(result)

    def _note(self, result: CopyResult) -> None:
        self._report.done[result.job] = 1
        store = result.direction is Direction.STORE
        if store:
            self._open_stores.remove(result.job)
        requests = self._waiting.pop(result.job, ())
        within_step = self._within_step.pop(result.job, None)
        self._finished.update(requests)
        if result.error is not None:
            logger.error("%s job %d failed: %s", result.direction.name.lower(), result.job, result.error)
            self._report.failed[result.job] = str(result.error)
            self._failed.update(requests)
            if within_step is not None:
                self._failed_blocks.update(within_step.pairs[:, 1].tolist())
        else:
            self._stats.add("bytes_stored" if store else "bytes_loaded", result.nbytes)
        self._stats.observe("store_seconds" if store else "load_seconds", result.seconds)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return (requests whose load behind the step has ended, those among them whose load failed)."""
        self._poll()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Return the device blocks of failed loads within a step."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> OffloadWorkerMetadata | None:
        """Return what the scheduler side must hear of, or None."""
        report, self._report = self._report, OffloadWorkerMetadata()
        return report if report.ranks or report.done else None

    def take_stats(self) -> OffloadStats | None:
        """Return what was counted since the last call, or None when nothing happened."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def shutdown(self) -> None:
        """End the copies in flight and give the host memory back."""
        if self._engine is not None:
            self._engine.close(COPY_TIMEOUT)
            self._engine = None
        if self._host is not None:
            self._host.close()
            self._host = None
