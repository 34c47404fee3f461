"""The worker side: one rank's host memory and its block copies."""

import torch

from npu_copy import CopyEngine, CopyResult, Direction, HostPool, UnsupportedLayout, find_regions
from offload_connector._vllm import (
    FAILED_LOADS_BY_BLOCK,
    FIGURES_FOLLOW_THE_WORKERS,
    KVCacheConfig,
    block_strides,
    init_logger,
)
from offload_connector.block_dims import block_dims
from offload_connector.checksums import BlockChecksums
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
        self._config = config
        self._num_blocks = kv_cache_config.num_blocks
        self._block_strides = block_strides(kv_cache_config)
        self._stats = OffloadStats()
        self._report = OffloadWorkerMetadata()
        self._host: HostPool | None = None
        self._engine: CopyEngine | None = None
        self._checksums: BlockChecksums | None = None
        self._open_stores: list[int] = []
        self._loads_behind: dict[int, CopyJob] = {}
        self._loads_within: dict[int, CopyJob] = {}
        self._differences: dict[int, RuntimeError | None] = {}
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
        try:
            dims = block_dims(kv_caches, self._num_blocks, self._block_strides)
            regions = find_regions(kv_caches, self._num_blocks, block_dim=dims)
        except UnsupportedLayout as refusal:
            self._report = OffloadWorkerMetadata(ranks=1, refusal=str(refusal))
            return
        block_bytes = sum(region.block_bytes for region in regions)
        capacity = self._config.cpu_bytes_per_rank // block_bytes
        if capacity < 1:
            raise ValueError(
                f"RecomputeCPUOffloadConnector: {PER_RANK} gives {self._config.cpu_bytes_per_rank} bytes, but a block "
                f"of this model takes {block_bytes} on each rank; give at least that, better the blocks of all "
                "requests that you expect to be preempted at once"
            )
        # One more than the budget holds: host block 0 mirrors the null block and is never handed out.
        self._host = HostPool.allocate(regions, capacity + 1)
        self._engine = CopyEngine(regions, self._host)
        if self._config.verify:
            self._checksums = BlockChecksums(regions)
        self._report = OffloadWorkerMetadata(ranks=1, capacity=capacity, block_bytes=block_bytes)
        logger.info(
            "Recompute offload: %d host blocks of %d bytes (%.2f GiB) on this rank, %d memory regions, copies by %s",
            capacity,
            block_bytes,
            capacity * block_bytes / (1 << 30),
            len(regions),
            self._engine.backend,
        )

    def store(self, metadata: OffloadMetadata) -> None:
        """Start this step's store; called before anything of the step touches a device block."""
        if self._engine is None:
            return
        # A connector beside this one may let another machine write into freed blocks, in no order with our streams.
        # Blocks freed in an earlier step may be written that way from now on, so their stores must have ended.
        for job in self._open_stores:
            self._engine.wait(job, COPY_TIMEOUT)
        if (store := metadata.store) is not None:
            if self._checksums is not None:
                self._checksums.note_store(store.pairs)
            self._engine.submit(store.job, store.pairs, Direction.STORE)
            self._open_stores.append(store.job)
            if metadata.store_first:
                self._engine.wait(store.job, COPY_TIMEOUT)

    def load(self, metadata: OffloadMetadata) -> None:
        """Start this step's loads; called before the forward if `load_now` is there, else at any time in the step."""
        if self._engine is None:
            return
        if (within := metadata.load_now) is not None:
            self._loads_within[within.job] = within
            self._engine.submit(within.job, within.pairs, Direction.LOAD, block_compute=True)
            if self._checksums is not None:
                # Now: the forward adds a token to the last block.
                self._engine.wait(within.job, COPY_TIMEOUT)
                self._differences[within.job] = self._checksums.difference(within.pairs)
        if (behind := metadata.load_behind) is not None:
            self._loads_behind[behind.job] = behind
            self._engine.submit(behind.job, behind.pairs, Direction.LOAD)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return (requests whose load behind the step has ended, those among them whose load failed)."""
        if self._engine is not None:
            # What the forward computes from a failed load must be known as wrong before its tokens leave this rank.
            for job in self._loads_within:
                self._engine.wait(job, COPY_TIMEOUT)
            for result in self._engine.poll():
                self._note(result)
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def _note(self, result: CopyResult) -> None:
        self._report.done[result.job] = 1
        if result.direction is Direction.STORE:
            self._open_stores.remove(result.job)
            error = result.error
        else:
            error = self._note_load(result)
        name = "store" if result.direction is Direction.STORE else "load"
        self._stats.observe(f"{name}_seconds", result.seconds)
        if error is None:
            self._stats.add("bytes_stored" if name == "store" else "bytes_loaded", result.nbytes)
            return
        logger.error("Recompute offload: %s job %d failed on this rank: %s", name, result.job, error)
        self._stats.add("copy_errors", label=name)
        self._report.failed[result.job] = str(error)

    def _note_load(self, result: CopyResult) -> BaseException | None:
        behind, within = self._loads_behind.pop(result.job, None), self._loads_within.pop(result.job, None)
        load = behind or within
        assert load is not None
        error = result.error
        if error is None and self._checksums is not None:
            error = self._differences.pop(load.job) if within else self._checksums.difference(load.pairs)
        self._finished.update(load.requests)
        if error is not None:
            self._failed.update(load.requests)
            if within is not None or FAILED_LOADS_BY_BLOCK:
                self._failed_blocks.update(load.pairs[:, 1].tolist())
        return error

    def take_failed_blocks(self) -> set[int]:
        """Return the device blocks of failed loads that vLLM must hear of by block."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> OffloadWorkerMetadata | None:
        """Return what the scheduler side must hear of, or None."""
        report, self._report = self._report, OffloadWorkerMetadata()
        return report if report.ranks or report.done else None

    def take_stats(self) -> OffloadStats | None:
        """Return what was counted since the last call; None when nothing happened, where vLLM can take that."""
        if self._stats.is_empty() and not FIGURES_FOLLOW_THE_WORKERS:
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def shutdown(self) -> None:
        """End the copies in flight and give the host memory back."""
        if self._engine is None or self._host is None:
            return
        engine, host, self._engine, self._host = self._engine, self._host, None, None
        try:
            engine.close(COPY_TIMEOUT)
        except TimeoutError as error:
            # The memory must outlive the copies; the process is about to end and takes it along.
            logger.error("Recompute offload: %s", error)
            return
        host.close()
