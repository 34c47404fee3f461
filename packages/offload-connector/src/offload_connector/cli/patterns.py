"""Which of a model's decoder layers have full attention, a sliding window or a recurrent state.

Every function raises LookupError where config.json does not tell, with the reason in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload_connector.cli.layout import Kind
from offload_connector.cli.states import STATE_FAMILIES

Config = Mapping[str, Any]
Kinds = tuple[Kind, ...]

NAMES: dict[str, Kinds] = {
    "full_attention": (Kind.FULL,),
    "attention": (Kind.FULL,),
    "sliding_attention": (Kind.WINDOW,),
    "linear_attention": (Kind.STATE,),
    "mamba": (Kind.STATE,),
    "mlp": (),
    "moe": (),
}
"""The names in `layer_types` and `layers_block_type`."""

LETTERS: dict[str, Kinds] = {"M": (Kind.STATE,), "*": (Kind.FULL,), "-": (), "E": ()}
"""Nemotron-H's `hybrid_override_pattern`."""

ALL_WINDOW = ("mistral",)
"""Model types where `sliding_window` alone means every layer."""

FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}
"""Model types without `layer_types` where every n-th layer has full attention and the others a window."""


def layer_kinds(text: Config) -> list[Kinds]:
    """Return what each decoder layer keeps, in order; () for a layer without a cache."""
    model_type = text.get("model_type", "")
    kinds = _listed(text) or _patterned(text, model_type) or [(Kind.FULL,)] * text["num_hidden_layers"]
    if model_type == "falcon_h1":
        kinds = [(Kind.FULL, Kind.STATE)] * text["num_hidden_layers"]
    foreign = any(key.startswith(("mamba_", "ssm_", "linear_num_")) for key in text)
    if model_type not in STATE_FAMILIES and (foreign or any(Kind.STATE in kind for kind in kinds)):
        raise LookupError(f"recurrent states of the model type {model_type} are not known here")
    if any(Kind.WINDOW in kind for kind in kinds) and not text.get("sliding_window"):
        raise LookupError("config.json has layers with a sliding window but no sliding_window")
    return kinds


def _listed(text: Config) -> list[Kinds] | None:
    if pattern := text.get("hybrid_override_pattern"):
        return _named(pattern, LETTERS, "hybrid_override_pattern")
    for key in ("layer_types", "layers_block_type"):
        if text.get(key):
            return _named(text[key], NAMES, key)
    return None


def _named(entries: Sequence[str], meanings: Mapping[str, Kinds], key: str) -> list[Kinds]:
    for entry in entries:
        if entry not in meanings:
            raise LookupError(f"config.json has {entry!r} in {key}, which is not known here")
    return [meanings[entry] for entry in entries]


def _patterned(text: Config, model_type: str) -> list[Kinds] | None:
    count = text["num_hidden_layers"]
    if "linear_num_value_heads" in text:
        return _every(count, text.get("full_attention_interval", 4), Kind.STATE)
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return None
    interval = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or FULL_EVERY.get(model_type)
    if interval:
        return _every(count, interval, Kind.WINDOW)
    if model_type in ALL_WINDOW:
        return [(Kind.WINDOW,)] * count
    raise LookupError("config.json has a sliding_window but no layer_types that say which layers have it")


def _every(count: int, interval: int, others: Kind) -> list[Kinds]:
    return [(others,) if (layer + 1) % interval else (Kind.FULL,) for layer in range(count)]


def window_size(text: Config) -> dict[Kind, int]:
    """Return the tokens that a layer of each attention kind sees; 0 for no limit."""
    window = text.get("sliding_window") or 0
    # Cohere's layers see the token itself besides the window.
    return {Kind.FULL: 0, Kind.WINDOW: window + (text.get("model_type") == "cohere2")}
