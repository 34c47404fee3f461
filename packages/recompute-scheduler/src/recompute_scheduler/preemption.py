"""The mixin that lets a KV connector keep what a preemption would throw away."""

from typing import Any

from recompute_scheduler._vllm import Request, init_logger
from recompute_scheduler.activation import Activation, decide
from recompute_scheduler.hook import HOOK, PreemptionHook, find_hooks

logger = init_logger("vllm.recompute_scheduler")


class RecomputePreemption:
    """Put before vLLM's Scheduler or AsyncScheduler in a class's bases.

    vLLM calls `_preempt_request` from two places: inside `schedule()`, when the KV cache is full, and from
    `reset_prefix_cache(reset_running_requests=True)`, when the KV has become invalid (new weights, say). Only the first
    may be kept, hence the note of being inside `schedule()`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inside_schedule = False
        self._hooks: list[PreemptionHook] = []
        # The flag may be absent here: whoever names this class with --scheduler-cls wants it on.
        if decide(self.vllm_config, requested=True) is Activation.ON:  # type: ignore[attr-defined]
            self._hooks = find_hooks(self.connector)  # type: ignore[attr-defined]
            if not self._hooks:
                logger.warning(
                    "The recompute scheduler is on, but no KV connector offers %s: preempted requests are recomputed "
                    "by vLLM. Add RecomputeCPUOffloadConnector to kv-transfer-config to keep their KV cache.",
                    HOOK,
                )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._inside_schedule = True
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._inside_schedule = False

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._inside_schedule and self._hooks:
            self._keep(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _keep(self, request: Request) -> bool:
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)  # type: ignore[attr-defined]
        for hook in self._hooks:
            if hook.update_state_before_preempt(request, block_ids, request.num_computed_tokens):
                logger.info(
                    "Recompute preemption offload enabled for request %s: %d tokens kept on the host",
                    request.request_id,
                    request.num_computed_tokens,
                )
                return True
        return False
