"""The vLLM connector: two roles, each handing its calls to the manager or the worker."""

from collections.abc import Iterable
from typing import Any

import torch

from offload_connector._vllm import (
    ForwardContext,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvent,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    PromMetric,
    PromMetricT,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
)
from offload_connector.config import OffloadConfig
from offload_connector.manager import OffloadManager
from offload_connector.metadata import OffloadMetadata, OffloadWorkerMetadata
from offload_connector.metrics import OffloadPromMetrics, OffloadStats
from offload_connector.worker import OffloadWorker


class RecomputeCPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of preempted Decode requests in host memory.

    Besides vLLM's connector interface it offers the preemption hook that the recompute scheduler calls:
    `update_state_before_preempt`, `has_preempted_request` and `has_pending_transfers`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = OffloadConfig.from_vllm(vllm_config)
        self._manager: OffloadManager | None = None
        self._worker: OffloadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._manager = OffloadManager.from_vllm(config, vllm_config, kv_cache_config)
        else:
            self._worker = OffloadWorker(config, kv_cache_config)

    @property
    def manager(self) -> OffloadManager:
        """The scheduler side; there in the scheduler's process only."""
        assert self._manager is not None, "this connector has the worker role"
        return self._manager

    @property
    def worker(self) -> OffloadWorker:
        """The worker side; there in the workers' processes only."""
        assert self._worker is not None, "this connector has the scheduler role"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what this connector keeps: a request may finish without it."""
        return False

    # The preemption hook

    def update_state_before_preempt(
        self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Keep the KV of a request whose blocks vLLM frees next. False: nothing was kept; recompute it."""
        return self.manager.keep(request, block_ids, num_computed_tokens)

    def has_preempted_request(self, req_id: str) -> bool:
        """Whether the KV of this request is on the host, or on its way there or back."""
        return self.manager.holds(req_id)

    def has_pending_transfers(self) -> bool:
        """Whether some copy has not been reported by every rank."""
        return self.manager.has_pending_jobs()

    def set_load_failure_policy(self, recompute: bool) -> None:
        """Called once by a scheduler that ends requests, or computes them again, when a load within their step fails.

        The policy stands at the top level of kv-transfer-config, where a child of MultiConnector does not see it.
        """
        self.manager.set_load_failure_policy(recompute)

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.manager.restorable_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.manager.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Every group: a saved request's own blocks come back whole, so none of them needs zeroing."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMetadata:
        return self.manager.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        message = connector_output.kv_connector_worker_meta
        self.manager.update(message if isinstance(message, OffloadWorkerMetadata) else None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.manager.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until every copy is reported: only then do host blocks come back."""
        return self.manager.has_pending_jobs()

    def reset_cache(self) -> bool:
        """Drop what is on the host: its KV belongs to a cache that is no longer valid."""
        self.manager.reset()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.manager.take_events()

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, OffloadMetadata)
        self.worker.store(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OffloadMetadata)
        self.worker.load(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are whole before the forward that reads them."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: KV is stored when its request is preempted."""

    def wait_for_save(self) -> None:
        """Nothing to do: no store reads what the forward writes."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self.worker.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        return self.worker.take_report()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    # Figures

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._manager or self.worker).take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
