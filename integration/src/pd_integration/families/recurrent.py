"""Hybrid families: attention beside recurrent state, Mamba2 or gated delta net (GDN)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_integration.families.attention import SHAPE, build
from pd_integration.models import family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@family("falcon-h1")
def falcon_h1(seed: int) -> PreTrainedModel:
    """Attention and Mamba2 side by side in every layer."""
    from transformers import FalconH1Config

    state: dict[str, Any] = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1}
    state |= {"mamba_d_state": 32, "mamba_d_conv": 4, "mamba_expand": 1, "mamba_chunk_size": 64}
    return build(FalconH1Config(**SHAPE, head_dim=32, num_hidden_layers=3, **state), seed)


@family("granite-hybrid")
def granite_hybrid(seed: int) -> PreTrainedModel:
    """Three Mamba2 layers for one of attention."""
    from transformers import GraniteMoeHybridConfig

    layers = ["mamba", "mamba", "attention", "mamba"]
    state: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32}
    state |= {"mamba_expand": 2, "mamba_chunk_size": 64, "position_embedding_type": "rope"}
    config = GraniteMoeHybridConfig(
        **SHAPE,
        num_hidden_layers=4,
        layer_types=layers,
        layers_block_type=layers,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        **state,
    )
    return build(config, seed)


def build_qwen3_next(layers: int, full: int, seed: int) -> PreTrainedModel:
    """Make a Qwen3-Next: `full` layers of attention behind `layers - full` gated delta nets.

    In bfloat16, the only type vLLM's CPU kernels of gated delta nets take. Its routed experts give zero: what their
    kernels give a token may depend on the others of the batch, see `batch_invariant`.
    """
    import torch
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        **{**SHAPE, "num_key_value_heads": 8},
        head_dim=64,
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * (layers - full) + ["full_attention"] * full,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    model = build(config, seed, torch.bfloat16)
    for name, weight in model.named_parameters():
        if ".experts." in name:
            weight.data.zero_()
    return model


@family("qwen3-next")
def qwen3_next(seed: int) -> PreTrainedModel:
    """Three gated delta nets for one layer of attention."""
    return build_qwen3_next(4, 1, seed)
