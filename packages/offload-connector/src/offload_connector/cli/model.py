"""From a model's config.json to what each of its layers keeps, per token or per request, on one rank.

Only what the file says for certain is used. Where a model keeps something else or more, `UnknownLayout` says so: vLLM
itself knows, and its numbers can be typed in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_connector.cli.layout import Kind, Layer
from offload_connector.cli.patterns import layer_kinds, window_size
from offload_connector.cli.states import state_bytes

Config = Mapping[str, Any]

DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
KV_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Model types with latent attention (MLA) that keep nothing but the latent vector and the rotary key."""

UNKNOWN_KEYS = (
    "index_topk",
    "compress_ratios",
    "num_kv_shared_layers",
    "attention_chunk_size",
    "global_head_dim",
    "num_global_key_value_heads",
    "block_configs",
    "attn_type_list",
    "linear_attn_config",
    "conv_L_cache",
    "is_encoder_decoder",
    "attn_layer_period",
    "attn_layer_indices",
    "cross_attention_layers",
    "attn_config",
    "multi_query",
    "use_cla",
    "layer_group_size",
    "hybrid_layer_pattern",
)
"""Keys of models whose layers differ in size, share their KV cache, or keep an index or encoder states as well."""

KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""Where vLLM looks for the number of KV heads, in this order; without any, each attention head has its own."""

ASK_VLLM = (
    "start vLLM once and type its numbers in: --bytes-per-block from its line 'Recompute offload: N host blocks of B "
    "bytes', or --kv-cache-memory and --kv-cache-tokens from its lines 'Available KV cache memory' and 'KV cache size'"
)


class UnknownLayout(ValueError):
    """The file does not tell what this model keeps; the message says which key stands in the way, and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; {ASK_VLLM}")


@dataclass(frozen=True)
class Model:
    """A model as far as its KV cache goes.

    Attributes:
        name: its architecture.
        layers: what each layer keeps on one rank of a tensor-parallel group.
        num_positions: decoder layers, which the pipeline stages share out.
        replicas: ranks of a tensor-parallel group that hold the same KV.
        has_states: some layers keep a recurrent state.
    """

    name: str
    layers: tuple[Layer, ...]
    num_positions: int
    replicas: int
    has_states: bool


def load_config(path: str) -> dict[str, Any]:
    """Read config.json at `path`, which is the file or the model's directory.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"--model {path}: cannot read {file} ({error.strerror}); give a local model directory or its config.json"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path}: {file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {path}: {file} holds a {type(config).__name__}, not an object")
    return config


def read_model(
    config: Config,
    *,
    tp: int = 1,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    draft_layers: int = 0,
    draft_tokens: int = 0,
    state_dtype: str = "auto",
) -> Model:
    """Say what each layer keeps on one rank.

    Args:
        config: the content of config.json.
        tp: tensor-parallel size.
        dtype: vLLM's `--dtype`.
        kv_dtype: vLLM's `--kv-cache-dtype`.
        draft_layers: layers of a draft (MTP, EAGLE) whose KV cache has the model's own shape.
        draft_tokens: speculative tokens per step.
        state_dtype: vLLM's `--mamba-ssm-cache-dtype`.

    Raises:
        UnknownLayout: the file does not tell.
        ValueError: the tensor-parallel size does not divide the model's heads.
    """
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    for key in UNKNOWN_KEYS:
        if text.get(key):
            raise UnknownLayout(f"config.json has {key}: such a model's KV cache cannot be derived from the file")
    try:
        kinds = layer_kinds(text)
        window = window_size(text)
        model_bytes = _dtype_bytes(text, dtype)
        heads, kv_heads, token_values = _attention(text, tp)
        has_states = any(Kind.STATE in layer for layer in kinds)
        state = state_bytes(text, tp, model_bytes, draft_tokens, state_dtype) if has_states else 0
    except KeyError as error:
        raise UnknownLayout(f"config.json lacks {error.args[0]}") from error
    except LookupError as error:
        raise UnknownLayout(str(error)) from error
    if heads % tp:
        raise ValueError(f"--tensor-parallel-size {tp} does not divide the model's {heads} attention heads")
    token_bytes = token_values * (model_bytes if kv_dtype == "auto" else KV_DTYPE_BYTES[kv_dtype])
    layers = [
        Layer(kind, state, position) if kind is Kind.STATE else Layer(kind, token_bytes, position, window[kind])
        for position, layer in enumerate(kinds)
        for kind in layer
    ]
    layers += [Layer(Kind.FULL, token_bytes, len(kinds) - 1)] * draft_layers
    if not any(layer.kind is not Kind.STATE for layer in layers):
        raise UnknownLayout("no layer of this model has attention")
    name = next(iter(config.get("architectures") or ()), config.get("model_type", "unnamed"))
    return Model(name, tuple(layers), len(kinds), max(1, tp // kv_heads), has_states)


def _dtype_bytes(text: Config, dtype: str) -> int:
    quantization = text.get("quantization_config") or {}
    if quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"):
        raise LookupError("the checkpoint brings a quantized KV cache")
    if dtype != "auto":
        return DTYPE_BYTES[dtype]
    name = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise LookupError(f"config.json has the dtype {name}")
    # --dtype auto runs a float32 checkpoint in 16 bits.
    return 2


def _attention(text: Config, tp: int) -> tuple[int, int, int]:
    """Return (attention heads, KV heads, both over all ranks; values that one rank keeps per token and layer)."""
    heads = text["num_attention_heads"]
    if text.get("model_type") in LATENT:
        # The latent vector serves all heads: every rank keeps it whole.
        return heads, 1, text["kv_lora_rank"] + text["qk_rope_head_dim"]
    if "kv_lora_rank" in text:
        raise LookupError(f"latent attention of the model type {text.get('model_type')} is not known here")
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    if text.get("v_head_dim", head_dim) != head_dim:
        raise LookupError("config.json has a v_head_dim of its own")
    kv_heads = next((text[key] for key in KV_HEADS if text.get(key)), heads)
    return heads, kv_heads, 2 * head_dim * max(1, kv_heads // tp)
