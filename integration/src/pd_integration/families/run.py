"""One family, arm after arm, in one process: what its requests put out, and what their preemptions cost."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_integration.deployment import offload
from pd_integration.families import batch_invariant
from pd_integration.families.recipes import Recipe
from pd_integration.plugin import keep_async_scheduling

REQUESTS = 12
OUTPUT_TOKENS = 200
AMPLE_BLOCKS = 1000
HOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Arm:
    """One way to run a family."""

    name: str
    pressure: bool = True
    saved: bool = False
    async_scheduling: bool = False


AMPLE = Arm("ample", pressure=False)
RECOMPUTE = Arm("recompute")
SAVED = Arm("saved", saved=True)
SAVED_ASYNC = Arm("saved, async", saved=True, async_scheduling=True)
ARMS = (AMPLE, RECOMPUTE, SAVED, SAVED_ASYNC)


@dataclass
class Outcome:
    """What one arm gave.

    Attributes:
        tokens: token ids of every request.
        preemptions: counted by vLLM.
        offloaded: what the connector counted by name, `preempted_restored`, `fallback host_full` and others; empty
            without it.
        acceptance: accepted drafts of proposed ones; None without speculation.
        adapted: in a run without pressure, requests with other tokens than without the LoRA adapter; None where there
            is none.
    """

    arm: Arm
    tokens: list[list[int]]
    preemptions: int
    offloaded: dict[str, float] = field(default_factory=dict)
    acceptance: float | None = None
    adapted: int | None = None


def prepare_environment() -> None:
    """Run the whole engine in this process, on the CPU, offline. Call it before vLLM is imported."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def run_arm(recipe: Recipe, arm: Arm, directory: Path, **overrides: Any) -> Outcome:
    """Run `recipe` as `arm` says; `directory` keeps the model. `overrides`: engine arguments for this arm alone."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    model = recipe.write(directory / "model")
    engine = dict(recipe.engine)
    sampling = {"temperature": 0.0, **engine.pop("sampling", {})}
    options = engine.pop("offload", {})
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 32,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        "num_gpu_blocks_override": recipe.blocks if arm.pressure else AMPLE_BLOCKS,
        **engine,
    }
    if recipe.speculative is not None:
        arguments["speculative_config"] = recipe.speculative(model, directory)
    if arm.saved:
        arguments["kv_transfer_config"] = offload(HOST_BYTES, verify_restored_blocks=True, **options)
        arguments["additional_config"] = {"recompute_scheduler_enable": True}
    arguments.update(overrides)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if arguments["dtype"] == "bfloat16":
        batch_invariant.install()

    with _scheduling(arm.async_scheduling):
        llm = LLM(str(model), **arguments)
    try:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == arm.async_scheduling
        prompts = [f"Hello world {index} ".ljust(15, ".") * (recipe.prompt // 15) for index in range(REQUESTS)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, **sampling)
        loras = _every_second(recipe, model, directory)
        outcome = _outcome(arm, _tokens(llm.generate(prompts, params, use_tqdm=False, lora_request=loras)), llm)
        if loras is not None and not arm.pressure:
            without = _tokens(llm.generate(prompts, params, use_tqdm=False))
            outcome.adapted = sum(a != b for a, b in zip(outcome.tokens, without, strict=True))
        return outcome
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _every_second(recipe: Recipe, model: Path, directory: Path) -> list[Any] | None:
    """The LoRA request of each request, None for every second one; None where the recipe has no adapter."""
    if recipe.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, str(recipe.adapter(directory / "adapter", model)))
    return [lora if index % 2 else None for index in range(REQUESTS)]


@contextlib.contextmanager
def _scheduling(asynchronous: bool) -> Iterator[None]:
    """vLLM's CPU platform as it is, or as it would be if it left async scheduling on."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]
    if asynchronous:
        keep_async_scheduling()
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def _outcome(arm: Arm, tokens: list[list[int]], llm: Any) -> Outcome:
    prefix = "vllm:recompute_offload_"
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            name = " ".join([metric.name, *(metric.labels[label] for label in ("reason",) if label in metric.labels)])
            values[name] = values.get(name, 0) + metric.value
    drafted = values.get("vllm:spec_decode_num_draft_tokens", 0)
    return Outcome(
        arm=arm,
        tokens=tokens,
        preemptions=int(values["vllm:num_preemptions"]),
        offloaded={name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)},
        acceptance=values["vllm:spec_decode_num_accepted_tokens"] / drafted if drafted else None,
    )
