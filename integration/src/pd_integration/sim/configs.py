"""vLLM's configuration and KV cache layout for a scenario, without a model."""

from __future__ import annotations

import copy
import functools
import hashlib
from typing import Any, Literal

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

import offload_connector.plugin
from block_mapper import GroupKind, KVGroup
from pd_integration.sim.forward import Layers
from pd_integration.sim.scenario import BLOCK, Scenario
from recompute_scheduler.testing import make_config

SIBLING = "ScriptedConnector"
OURS = offload_connector.plugin.NAME


@functools.cache
def _base(speculative: bool) -> tuple[VllmConfig, StructuredOutputManager]:
    offload_connector.plugin.register()
    if SIBLING not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(SIBLING, "pd_integration.sim.sibling", SIBLING)
    options: dict[str, Any] = {}
    if speculative:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = make_config(max_model_len=64, **options)
    return config, StructuredOutputManager(config)


def structured_output_manager() -> StructuredOutputManager:
    return _base(False)[1]


def layers_of(scenario: Scenario) -> Layers:
    # Two layers of the model show a copy that took one of them only; with four ranks one is enough.
    target = 1 if scenario.ranks == 4 else 2
    draft = range(target, target + (scenario.lookahead > 0))
    return Layers(scenario.groups, range(target), draft, scenario.lookahead)


def vllm_config(scenario: Scenario, block_bytes: int) -> VllmConfig:
    """The configuration of the engine: copies of one that was made the usual way, with the scenario's values."""
    config = copy.copy(_base(scenario.num_drafts > 0)[0])
    scheduler = config.scheduler_config = copy.copy(config.scheduler_config)
    scheduler.async_scheduling = scenario.mode == "async"
    scheduler.max_num_seqs = scenario.max_num_seqs
    scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = scenario.token_budget
    scheduler.policy = "priority" if scenario.priority else "fcfs"
    cache = config.cache_config = copy.copy(config.cache_config)
    cache.enable_prefix_caching = scenario.prefix_caching
    cache.num_gpu_blocks = scenario.num_blocks
    cache.block_size = BLOCK
    cache.mamba_cache_mode = _mamba_mode(scenario)
    model = config.model_config = copy.copy(config.model_config)
    model.max_model_len = scenario.max_model_len
    model.generation_config = "vllm"  # there is no model to read one from
    parallel = config.parallel_config = copy.copy(config.parallel_config)
    parallel.world_size = scenario.ranks
    if scenario.mode == "pipeline":
        parallel.pipeline_parallel_size = 2
    if config.speculative_config is not None:
        speculative = config.speculative_config = copy.copy(config.speculative_config)
        speculative.num_speculative_tokens = scenario.num_drafts
        if scenario.lookahead:
            speculative.method = "draft_model"
    config.kv_transfer_config = _transfer_config(scenario, block_bytes)
    return config


def _transfer_config(scenario: Scenario, block_bytes: int) -> KVTransferConfig:
    # What a budget of nothing stands for is decided when the memory is registered; the key takes positive numbers only.
    ours: dict[str, Any] = {
        "kv_connector": OURS,
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use_per_rank": max(1, scenario.host_blocks) * block_bytes,
            "enable_offload_prefix_caching": scenario.share_prefixes,
        },
    }
    if scenario.sibling == "none":
        return KVTransferConfig(**ours, kv_load_failure_policy=scenario.failure_policy)
    children = [{"kv_connector": SIBLING, "kv_role": "kv_consumer"}, ours]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_consumer",
        kv_load_failure_policy=scenario.failure_policy,
        kv_connector_extra_config={"connectors": children if scenario.sibling == "before" else children[::-1]},
    )


def kv_cache_config(scenario: Scenario, layers: Layers) -> KVCacheConfig:
    """One group per kind; the layers of all groups share the memory, as vLLM's hybrid allocator has it."""
    groups = [
        KVCacheGroupSpec([f"group.{g}.layer.{slot}" for slot in range(layers.total)], _spec(group, scenario))
        for g, group in enumerate(layers.groups)
    ]
    return KVCacheConfig(num_blocks=scenario.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _spec(group: KVGroup, scenario: Scenario) -> KVCacheSpec:
    attention: dict[str, Any] = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    if group.kind is GroupKind.FULL:
        return FullAttentionSpec(**attention)
    if group.kind is GroupKind.SLIDING_WINDOW:
        return SlidingWindowSpec(**attention, sliding_window=group.window or 0)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.window or 0)
    return MambaSpec(
        block_size=group.block_size,
        shapes=((64,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=_mamba_mode(scenario),
        num_speculative_blocks=group.speculative_blocks,
        page_size_padded=2 * 8 * 4 * BLOCK,
    )


def _mamba_mode(scenario: Scenario) -> Literal["align", "none"]:
    return "align" if "aligned" in scenario.model else "none"


def block_hash(value: object) -> bytes:
    """vLLM's prefix cache hash, quick and the same in every process."""
    return hashlib.sha256(repr(value).encode()).digest()
