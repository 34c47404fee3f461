"""vLLM's real scheduler without an engine: for tests of schedulers, hooks and connectors.

The model never runs; its output tokens are made up from the request and the position, so a request that goes on from
the right place gives the same tokens however often it was preempted.
"""

import hashlib
import json
import os
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from recompute_scheduler._vllm import (
    VICTIMS_MAY_BE_IN_FLIGHT,
    EngineCoreOutput,
    Request,
    Scheduler,
    VllmConfig,
    loads_before_forward,
    worker_output,
)

__all__ = [
    "BLOCK_SIZE",
    "VICTIMS_MAY_BE_IN_FLIGHT",
    "VOCABULARY",
    "ScriptedEngine",
    "loads_before_forward",
    "make_config",
    "make_kv_cache_config",
    "worker_output",
]

BLOCK_SIZE = 16
VOCABULARY = 512
_REQUEST_OPTIONS = ("priority", "arrival_time", "mm_features", "resumable")


def make_config(*, async_scheduling: bool = False, **engine_args: Any) -> VllmConfig:
    """Return vLLM's configuration for a tiny Llama whose weights are never loaded.

    Args:
        async_scheduling: set last of all, since vLLM's CPU platform turns it off.
        engine_args: further arguments of vLLM's EngineArgs.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as model:
        shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, **shape}
        with open(os.path.join(model, "config.json"), "w") as file:
            json.dump({**config, "intermediate_size": 64, "max_position_embeddings": 1 << 20, "dtype": "float32"}, file)
        defaults: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            "enforce_eager": True,
        }
        vllm_config = EngineArgs(**{**defaults, **engine_args}).create_engine_config()
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    return vllm_config


def make_kv_cache_config(num_blocks: int, specs: Sequence[KVCacheSpec] | None = None) -> KVCacheConfig:
    """Return a KV cache of `num_blocks` blocks, the null block included, with one group per spec."""
    import torch

    specs = specs or [FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)]
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class ScriptedEngine:
    """One real scheduler, stepped by hand.

    Attributes:
        outputs: token ids put out so far, by request.
        ends: the last output of each request that has ended.
        trace: scheduled tokens by request, one entry per step.
        connector_stats: what connectors hand to vLLM's /metrics, one entry per step that had any.

    Args:
        scheduler_cls: vLLM's Scheduler or AsyncScheduler, or a class made from them.
        vllm_config: see `make_config`; with async scheduling one step is in flight while the next is scheduled.
        kv_cache_config: see `make_kv_cache_config`.
        worker: stands for the workers: carries out a scheduled step, returns what their connectors report after it.
    """

    def __init__(
        self,
        scheduler_cls: type[Scheduler],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        worker: Callable[[SchedulerOutput], KVConnectorOutput | None] = lambda _: None,
    ) -> None:
        init_none_hash(_hash)
        vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        vllm_config.cache_config.block_size = self.block_size
        self._hasher = get_request_block_hasher(self.block_size, _hash)
        self.scheduler = scheduler_cls(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=self.block_size,
            hash_block_size=self.block_size,
            log_stats=True,
        )
        self.worker = worker
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.trace: list[dict[str, int]] = []
        self.connector_stats: list[dict[str, Any]] = []
        self._depth = 2 if vllm_config.scheduler_config.async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Request:
        """Queue a request, or the next input of one that is `resumable`.

        Args:
            request_id: of the request.
            prompt: token ids.
            max_tokens: tokens to put out.
            options: SamplingParams fields, or one of Request's: see `_REQUEST_OPTIONS`.
        """
        attributes = {name: options.pop(name) for name in _REQUEST_OPTIONS if name in options}
        options.setdefault("temperature", 0.0)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        request = Request(request_id, list(prompt), params, None, block_hasher=self._hasher, **attributes)
        self.scheduler.add_request(request)
        self.outputs.setdefault(request_id, [])
        return request

    def step(self) -> SchedulerOutput:
        """Schedule one step and take in the output of the step that is due."""
        scheduled = self.scheduler.schedule()
        self.trace.append(dict(scheduled.num_scheduled_tokens))
        self._in_flight.append((scheduled, self.run_model(scheduled)))
        if len(self._in_flight) >= self._depth:
            self._take_in()
        return scheduled

    def run(self, max_steps: int = 2000) -> None:
        """Step until every request has ended; RuntimeError when that takes more than `max_steps`."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                while self._in_flight:
                    self._take_in()
                return
            if not self.step().num_scheduled_tokens:
                # A load on a thread of its own may be all that is waited for: let it have the processor.
                time.sleep(0.001)
        raise RuntimeError(f"requests are left after {max_steps} steps: {sorted(self.scheduler.requests)}")

    def run_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Make up the output of a scheduled step, and let the workers carry it out."""
        ids = list(scheduled.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            # vLLM has moved num_computed_tokens on already; it is now the position of the token to sample.
            sampled = [] if request.is_prefill_chunk else [_token(request_id, request.num_computed_tokens)]
            tokens.append(sampled)
        report = self.worker(scheduled)
        return ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, tokens, kv_connector_output=report)

    def _take_in(self) -> None:
        scheduled, output = self._in_flight.popleft()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.connector_stats.append(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                self.outputs[one.request_id].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ends[one.request_id] = one


def _token(request_id: str, position: int) -> int:
    return 3 + (zlib.crc32(request_id.encode()) + 31 * position) % (VOCABULARY - 3)


def _hash(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()
