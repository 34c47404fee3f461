"""LoRA adapters for the tiny models."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8
STD = 0.05
"""Large enough that an adapter changes a request's tokens from the first few on."""


def write_adapter(directory: Path, model: Path, seed: int = 0) -> Path:
    """Write a LoRA adapter with random weights for the attention layers of `model`, in the layout of PEFT."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    names = ("q_proj", "v_proj", "o_proj")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for key in weights.keys():  # noqa: SIM118 - it is no dict
            if key.split(".")[-2] in names:
                outputs, inputs = weights.get_slice(key).get_shape()
                place = f"base_model.model.{key.removesuffix('.weight')}"
                tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * STD
                tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * STD
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(names)}))
    return directory
