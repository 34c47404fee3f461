"""Draft models for speculative decoding: made so that some of their drafts are right, though all weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_integration.families.attention import SHAPE, build
from pd_integration.families.recurrent import build_qwen3_next
from pd_integration.models import family, write_model, write_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

HIDDEN = SHAPE["hidden_size"]


def write_eagle(directory: Path, target: Path, seed: int = 0) -> Path:
    """Write an EAGLE head for the Llama in `target`: its last layer, on the target's hidden state."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig

    write_tokenizer(directory)
    config = LlamaConfig(**SHAPE, head_dim=32, num_hidden_layers=1).to_dict()
    config["architectures"] = ["EagleLlamaForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    last = "model.layers.3."
    head = {
        name.replace(last, "layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last) and "input_layernorm" not in name
    }
    head["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    # From (embedding, hidden state) keep the hidden state.
    head["fc.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    save_file(head, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _noise(seed: int) -> torch.Tensor:
    import torch

    return torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.008


def _rewrite(directory: Path, change: dict[str, Any], source: str, target: str, extra: dict[str, torch.Tensor]) -> None:
    """Turn the layer `source` of the model in `directory` into the draft layer `target`."""
    from safetensors.torch import load_file, save_file

    config_file = directory / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **change}))
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.startswith(source)]:
        weights[name.replace(source, target)] = weights.pop(name)
    save_file({**weights, **extra}, directory / "model.safetensors", metadata={"format": "pt"})


@family("mimo")
def mimo(seed: int) -> PreTrainedModel:
    """The target of `write_mimo` with one layer more, which becomes the draft layer."""
    from transformers import Qwen2Config

    return build(Qwen2Config(**SHAPE, num_hidden_layers=4), seed)


def write_mimo(directory: Path, seed: int = 0) -> Path:
    """Write a MiMo: multi-token prediction (MTP) by one layer of full attention."""
    import torch

    write_model(directory, "mimo", seed)
    layer = "model.mtp_layers.0."
    extra = {
        f"{layer}{name}.weight": torch.ones(HIDDEN)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    extra[f"{layer}input_proj.weight"] = torch.cat([torch.eye(HIDDEN), _noise(seed)], dim=1)
    change = {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    _rewrite(directory, {**change, "layer_types": ["full_attention"] * 3}, "model.layers.3.", layer, extra)
    return directory


@family("qwen3-next-with-draft")
def qwen3_next_with_draft(seed: int) -> PreTrainedModel:
    """The target of `write_qwen3_next_mtp` with one layer more, which becomes the draft layer."""
    return build_qwen3_next(5, 2, seed)


def write_qwen3_next_mtp(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen3-Next with its MTP layer: recurrent state with slots for the drafts."""
    import torch

    write_model(directory, "qwen3-next-with-draft", seed)
    extra = {
        f"mtp.{name}.weight": torch.zeros(HIDDEN) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    extra["mtp.fc.weight"] = torch.cat([_noise(seed), torch.eye(HIDDEN)], dim=1).to(torch.bfloat16)
    layers = ["linear_attention"] * 3 + ["full_attention"]
    change = {"num_hidden_layers": 4, "layer_types": layers, "num_nextn_predict_layers": 1}
    _rewrite(directory, change, "model.layers.4.", "mtp.layers.0.", extra)
    return directory
