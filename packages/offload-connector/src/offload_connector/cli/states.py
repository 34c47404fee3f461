"""Bytes of one layer's recurrent state (Mamba2, gated delta net) on one rank, from a model's config.json.

After vLLM 0.32's `MambaStateShapeCalculator` and `MambaStateDtypeCalculator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def state_bytes(text: Config, tp: int, model_bytes: int, draft_tokens: int, state_dtype: str = "auto") -> int:
    """Return the bytes of one state.

    Args:
        text: the language model's part of config.json, of a type in `STATE_FAMILIES`.
        tp: tensor-parallel size, which shares the heads out.
        model_bytes: bytes of the model's dtype.
        draft_tokens: speculative tokens per step: the convolution's inputs are kept that much longer.
        state_dtype: vLLM's `--mamba-ssm-cache-dtype`.
    """
    conv_width, kernel, state_values, models_dtype = STATE_FAMILIES[text["model_type"]](text, tp)
    dtype = models_dtype if state_dtype == "auto" else state_dtype
    state_width = DTYPE_BYTES[dtype] if dtype else model_bytes
    conv_inputs = conv_width // tp * (kernel - 1 + draft_tokens)
    return conv_inputs * model_bytes + state_values // tp * state_width


_Shape = tuple[int, int, int, str | None]
"""(values of one convolution input, kernel, values of the state, all over all ranks; the dtype the model asks for)"""


def _mamba2(width: int, groups: int, heads: int, head_dim: int, state: int, kernel: int, tp: int) -> _Shape:
    # Groups that do not divide are repeated, so that each rank has the groups of its heads.
    groups = groups if groups % tp == 0 else tp
    return width + 2 * groups * state, kernel, heads * head_dim * state, None


def _falcon(text: Config, tp: int) -> _Shape:
    width = text.get("mamba_d_ssm") or int(text["mamba_expand"] * text["hidden_size"])
    return _granite({**text, "mamba_width": width}, tp)


def _granite(text: Config, tp: int) -> _Shape:
    width = text.get("mamba_width") or text["mamba_expand"] * text["hidden_size"]
    heads = (text["mamba_n_heads"], text["mamba_d_head"], text["mamba_d_state"])
    return _mamba2(width, text["mamba_n_groups"], *heads, text["mamba_d_conv"], tp)


def _nemotron(text: Config, tp: int) -> _Shape:
    heads = (text["mamba_num_heads"], text["mamba_head_dim"], text["ssm_state_size"])
    shape = _mamba2(heads[0] * heads[1], text["n_groups"], *heads, text["conv_kernel"], tp)
    return *shape[:3], text.get("mamba_ssm_cache_dtype", "float32")


def _gated_delta_net(text: Config, tp: int) -> _Shape:
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    state = values * text["linear_key_head_dim"]
    return 2 * keys + values, text["linear_conv_kernel_dim"], state, text.get("mamba_ssm_dtype")


STATE_FAMILIES: dict[str, Callable[[Config, int], _Shape]] = {
    "falcon_h1": _falcon,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    "qwen3_next": _gated_delta_net,
    "qwen3_5": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
}
