"""Attention families: sliding windows beside full attention, and latent attention (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_integration.models import SPECIAL_TOKENS, VOCAB_SIZE, family, fill

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

WINDOW = 64

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": SPECIAL_TOKENS["<s>"],
    "eos_token_id": SPECIAL_TOKENS["</s>"],
    "pad_token_id": SPECIAL_TOKENS["<pad>"],
    "tie_word_embeddings": False,
}
"""What all tiny models share; a token is a byte."""


def build(config: PretrainedConfig, seed: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make the model of `config` with random weights; tied embeddings are kept small, or every logit is the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    fill(model, seed)
    if config.tie_word_embeddings:
        model.get_input_embeddings().weight.data.mul_(0.25)
    return model if dtype is None else model.to(dtype)


def windows(pattern: str) -> dict[str, Any]:
    """Layers by letter: s for a sliding window, f for full attention."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [kinds[letter] for letter in pattern],
        "sliding_window": WINDOW,
        "head_dim": 32,
    }


@family("gpt-oss")
def gpt_oss(seed: int) -> PreTrainedModel:
    """Windows and full attention in turn, mixture of experts: 2 KV cache groups."""
    from transformers import GptOssConfig

    return build(GptOssConfig(**SHAPE, **windows("sfsf"), num_local_experts=4, num_experts_per_tok=2), seed)


@family("ministral")
def ministral(seed: int) -> PreTrainedModel:
    """Full attention first: 2 KV cache groups."""
    from transformers import MinistralConfig

    return build(MinistralConfig(**SHAPE, **windows("fsfs")), seed)


@family("cohere2")
def cohere2(seed: int) -> PreTrainedModel:
    """Three windows for one full attention: 4 KV cache groups over one memory."""
    from transformers import Cohere2Config

    return build(Cohere2Config(**{**SHAPE, "tie_word_embeddings": True}, **windows("sssf")), seed)


@family("gemma3")
def gemma3(seed: int) -> PreTrainedModel:
    """Five windows for one full attention: 6 KV cache groups over one memory."""
    from transformers import Gemma3TextConfig

    shape = {**SHAPE, "tie_word_embeddings": True}
    return build(Gemma3TextConfig(**shape, **windows("sssssf"), query_pre_attn_scalar=32), seed)


@family("deepseek-v2")
def deepseek_v2(seed: int) -> PreTrainedModel:
    """Latent attention: one compressed vector a token and layer."""
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        **{**SHAPE, "num_key_value_heads": 8},
        num_hidden_layers=3,
        first_k_dense_replace=3,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_group=1,
        topk_group=1,
    )
    return build(config, seed)
