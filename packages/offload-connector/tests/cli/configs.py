"""Small models of each family, as their config.json says it."""

BASE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_routed_experts": 4}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 8,
}
MAMBA = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}


def model(architecture, model_type, **changes):
    return {**BASE, "architectures": [architecture], "model_type": model_type, **changes}


WINDOW, FULL = "sliding_attention", "full_attention"

CONFIGS = {
    "llama": model("LlamaForCausalLM", "llama", num_hidden_layers=5),
    "qwen2": model("Qwen2ForCausalLM", "qwen2", sliding_window=64, use_sliding_window=False, max_window_layers=4),
    "mixtral": model("MixtralForCausalLM", "mixtral", head_dim=64, num_local_experts=4, num_experts_per_tok=2),
    "mistral": model("MistralForCausalLM", "mistral", head_dim=32, sliding_window=64),
    "gpt_oss": model(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=32,
        sliding_window=64,
        layer_types=[WINDOW, FULL, WINDOW, FULL, WINDOW],
        num_hidden_layers=5,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gemma2": model("Gemma2ForCausalLM", "gemma2", head_dim=32, sliding_window=64, query_pre_attn_scalar=32),
    "gemma3": model(
        "Gemma3ForCausalLM",
        "gemma3_text",
        head_dim=32,
        sliding_window=64,
        sliding_window_pattern=6,
        num_hidden_layers=7,
        query_pre_attn_scalar=32,
    ),
    "cohere2": model("Cohere2ForCausalLM", "cohere2", sliding_window=65, layer_types=[WINDOW, WINDOW, WINDOW, FULL]),
    "deepseek_v2": model("DeepseekV2ForCausalLM", "deepseek_v2", **LATENT, **EXPERTS),
    "deepseek_v3": model("DeepseekV3ForCausalLM", "deepseek_v3", **{**LATENT, "q_lora_rank": 64}, **EXPERTS),
    "falcon_h1": model("FalconH1ForCausalLM", "falcon_h1", head_dim=32, **{**MAMBA, "mamba_d_ssm": 512}),
    "granite": model(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        position_embedding_type="rope",
        **MAMBA,
    ),
    "nemotron_h": model(
        "NemotronHForCausalLM",
        "nemotron_h",
        head_dim=32,
        hybrid_override_pattern="M-M*",
        mamba_num_heads=16,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=32,
        conv_kernel=4,
        chunk_size=64,
    ),
    "qwen3_next": model(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        head_dim=64,
        num_hidden_layers=8,
        full_attention_interval=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **EXPERTS,
    ),
}
# One layer more of one kind than of the other: a group is padded rather than split.
CONFIGS["gpt_oss_odd"] = {**CONFIGS["gpt_oss"], "num_hidden_layers": 7, "layer_types": [WINDOW, FULL] * 3 + [WINDOW]}
