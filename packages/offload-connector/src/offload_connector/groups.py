"""From vLLM's KV cache groups to block-mapper's."""

from block_mapper import GroupKind, KVGroup, UnsupportedGroup
from offload_connector._vllm import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def mapper_groups(kv_cache_config: KVCacheConfig) -> list[KVGroup]:
    """Describe every KV cache group of the model to block-mapper, in vLLM's order.

    Raises:
        UnsupportedGroup: a group whose blocks block-mapper does not know how to place (cross-attention, say).
    """
    return [_group(group.kv_cache_spec, group.layer_names) for group in kv_cache_config.kv_cache_groups]


def _group(spec: KVCacheSpec, layers: list[str]) -> KVGroup:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        # All its layers share one block table and one kind; only their page sizes differ.
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, FullAttentionSpec):
        # Multi-head, grouped and latent (MLA) attention; a window noted here is the attention's, blocks are all kept.
        return KVGroup(GroupKind.FULL, spec.block_size)
    if isinstance(spec, SlidingWindowSpec):
        return KVGroup(GroupKind.SLIDING_WINDOW, spec.block_size, window=spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return KVGroup(GroupKind.CHUNKED_LOCAL, spec.block_size, window=spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        return KVGroup(GroupKind.RECURRENT, spec.block_size, speculative_blocks=spec.num_speculative_blocks)
    raise UnsupportedGroup(
        f"{type(spec).__name__} of layers {', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''}"
    )
