"""How each family is run under pressure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_integration.models import write_model


@dataclass(frozen=True)
class Recipe:
    """One family on the engine.

    Attributes:
        blocks: KV cache blocks under pressure, about half of what the requests come to need.
        model: family name in `pd_integration.models`, or a function that writes a model into a directory.
        speculative: from the directory of the run, vLLM's speculative_config.
        engine: further engine arguments, and under "sampling" and "offload" those of the requests and the connector.
        async_scheduling: whether vLLM runs it with async scheduling.
        exact: whether plain vLLM gives the same tokens whatever else is in the batch. Where it does not, restored KV is
            compared byte by byte alone.
        process_per_arm: whether vLLM can make such an engine only once in a process.
        prompt: characters, that is tokens, of each prompt.
        adapter: writes a LoRA adapter into a directory, for a model; every second request is made with it.
    """

    blocks: int
    model: str | Callable[[Path], Path] = "llama"
    speculative: Callable[[Path, Path], dict[str, Any]] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    async_scheduling: bool = True
    exact: bool = True
    process_per_arm: bool = False
    prompt: int = 75
    adapter: Callable[[Path, Path], Path] | None = None

    def write(self, directory: Path) -> Path:
        """Write the model once."""
        if not (directory / "config.json").exists():
            write_model(directory, self.model) if isinstance(self.model, str) else self.model(directory)
        return directory


def _eagle(model: Path, directory: Path) -> dict[str, Any]:
    from pd_integration.families.speculative import write_eagle

    return {"method": "eagle", "model": str(write_eagle(directory / "eagle", model)), "num_speculative_tokens": 3}


def _adapter(directory: Path, model: Path) -> Path:
    from pd_integration.families.adapters import write_adapter

    return write_adapter(directory, model)


def _mimo(directory: Path) -> Path:
    from pd_integration.families.speculative import write_mimo

    return write_mimo(directory)


def _qwen3_next_mtp(directory: Path) -> Path:
    from pd_integration.families.speculative import write_qwen3_next_mtp

    return write_qwen3_next_mtp(directory)


WORKERS = {"distributed_executor_backend": "mp"}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, **WORKERS}
# vLLM's CPU workers exchange the stages' tensors only through its compiled path.
PIPELINE_PARALLEL = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
    **WORKERS,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
# One slot more than adapters: vLLM's CPU kernels apply the last slot to the requests that have none.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
HYBRID = {"block_size": None}
BF16 = {"block_size": None, "dtype": "bfloat16"}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe(48),
    "llama, prefix caching": Recipe(48, engine={"enable_prefix_caching": True}),
    "llama, chunked prefill": Recipe(48, engine={"max_num_batched_tokens": 32}),
    "llama, seeded sampling": Recipe(48, engine={"sampling": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}),
    "llama, shared host prefixes": Recipe(48, engine={"offload": {"enable_offload_prefix_caching": True}}),
    "llama, tensor parallel": Recipe(48, engine=TENSOR_PARALLEL),
    "llama, pipeline parallel": Recipe(48, engine=PIPELINE_PARALLEL, async_scheduling=False),
    "llama, LoRA": Recipe(48, engine=LORA, adapter=_adapter),
    "gpt-oss (2 groups)": Recipe(60, "gpt-oss"),
    "gpt-oss, prefix caching": Recipe(60, "gpt-oss", engine={"enable_prefix_caching": True}),
    "ministral (2 groups)": Recipe(60, "ministral"),
    "cohere2 (4 groups)": Recipe(100, "cohere2"),
    "gemma3 (6 groups)": Recipe(130, "gemma3"),
    "falcon-h1 (Mamba2)": Recipe(30, "falcon-h1", engine=HYBRID),
    "granite-hybrid (Mamba2)": Recipe(40, "granite-hybrid", engine=HYBRID),
    "qwen3-next (GDN)": Recipe(30, "qwen3-next", engine=BF16),
    "qwen3-next, prefix caching": Recipe(40, "qwen3-next", engine={**BF16, "enable_prefix_caching": True}),
    "deepseek-v2 (MLA)": Recipe(60, "deepseek-v2", engine={"block_size": 16}, exact=False),
    "llama, n-gram": Recipe(48, speculative=lambda model, _: NGRAM, async_scheduling=False, process_per_arm=True),
    "llama, draft model": Recipe(
        96, speculative=lambda model, _: {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    ),
    "llama, EAGLE": Recipe(48, speculative=_eagle),
    "mimo (MTP)": Recipe(48, _mimo, speculative=lambda *_: {"method": "mtp", "num_speculative_tokens": 1}),
    "qwen3-next (MTP)": Recipe(
        60, _qwen3_next_mtp, lambda *_: {"method": "mtp", "num_speculative_tokens": 2}, engine=BF16
    ),
}
