"""Tiny models of every KV cache kind, and what preemption does to their output.

`python -m pd_integration.families` runs them on the real engine: with an ample KV cache, with vLLM's own recompute
under pressure, and with the KV kept on the host. Importing this package registers the models with
`pd_integration.models`.
"""

from pd_integration.families import attention, recurrent, speculative
from pd_integration.families.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "attention", "recurrent", "speculative"]
