"""The mixin that lets a KV connector keep what a preemption would throw away."""

from collections import Counter
from typing import Any

from recompute_scheduler._vllm import (
    VICTIMS_MAY_BE_IN_FLIGHT,
    Backports,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Request,
    RequestStatus,
    honour_watermark,
    init_logger,
)
from recompute_scheduler.activation import Activation, decide
from recompute_scheduler.fallback import FALLBACK, STOP_REASON, Fallback
from recompute_scheduler.headroom import Headroom
from recompute_scheduler.hook import HOOK, HeedsLoadFailurePolicy, PreemptionHook, find_hooks
from recompute_scheduler.left_out import may_lose_its_state
from recompute_scheduler.standstill import is_at_standstill, resolve, take_all_blocks

logger = init_logger("vllm.recompute_scheduler")


class RecomputePreemption(Backports):
    """Put before vLLM's Scheduler or AsyncScheduler in a class's bases.

    vLLM calls `_preempt_request` from two places: inside `schedule()`, when the KV cache is full, and from
    `reset_prefix_cache(reset_running_requests=True)`, when the KV has become invalid (new weights, say). Only the first
    may be kept, hence the note of being inside `schedule()`.

    Attributes:
        recompute_counters: since the start, "preempted", "offloaded", "recomputed" and "resent" requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute_counters: Counter[str] = Counter()
        self._inside_schedule = False
        self._standstill = False
        self._hooks: list[PreemptionHook] = []
        self._to_resend: list[Request] = []
        self._resent: list[Request] = []
        self._told: set[str] = set()
        # The flag may be absent here: whoever names this class with --scheduler-cls wants it on.
        if decide(self.vllm_config, requested=True) is Activation.ON:  # type: ignore[attr-defined]
            self._hooks = find_hooks(self.connector)  # type: ignore[attr-defined]
            if not self._hooks:
                logger.warning(
                    "The recompute scheduler is on, but no KV connector offers %s: preempted requests are recomputed "
                    "by vLLM. Add RecomputeCPUOffloadConnector to kv-transfer-config to keep their KV cache.",
                    HOOK,
                )
        for hook in self._hooks:
            if isinstance(hook, HeedsLoadFailurePolicy):
                # A victim's token outlives it where vLLM keeps it: then the end of a request is not complete either.
                hook.set_load_failure_policy(self.recompute_kv_load_failures or VICTIMS_MAY_BE_IN_FLIGHT)  # type: ignore
        if may_lose_its_state(self):  # type: ignore[arg-type]
            logger.warning(
                "With asynchronous scheduling vLLM may leave running requests out of a step when the KV cache is full. "
                "This model has recurrent states and decodes speculatively: such requests go on from another state and "
                "put out other tokens. Start vLLM with --no-async-scheduling."
            )
        self._fallback = Fallback.from_vllm(self.vllm_config)  # type: ignore[attr-defined]
        honour_watermark(self)  # type: ignore[arg-type]
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        self._headroom = Headroom(self.kv_cache_config, manager.watermark_blocks)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._standstill:
            self._resolve_standstill()
        if self._hooks:
            self.kv_cache_manager.watermark_blocks = self._blocks_to_keep_free()  # type: ignore[attr-defined]
        self._inside_schedule = True
        try:
            scheduled = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._inside_schedule = False
        if self._to_resend:
            self._end_for_resend()
        # A step that preempts lets nobody in, whoever could run.
        empty = not scheduled.num_scheduled_tokens and not scheduled.preempted_req_ids
        self._standstill = empty and is_at_standstill(self)  # type: ignore[arg-type]
        return scheduled

    def _resolve_standstill(self) -> None:
        resolve(self, self._give_up)  # type: ignore[arg-type]

    def _give_up(self, request: Request) -> None:
        kept = bool(self._hooks) and self._keep(request)
        if not kept:
            self.recompute_counters["recomputed"] += 1
        logger.warning(
            "Waiting requests hold the whole KV cache and none can go on: request %s gives its blocks up and is %s",
            request.request_id,
            "saved" if kept else "recomputed",
        )

    def _blocks_to_keep_free(self) -> int:
        if self.finished_recving_kv_req_ids:  # type: ignore[attr-defined]
            # These hold the blocks of their load already: to keep them out would only waste those.
            return self._headroom.watermark_blocks
        return self._headroom.blocks(self.running, self.current_step)  # type: ignore[attr-defined]

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests:
            # The KV of running requests is declared invalid; what was kept of requests preempted before is no better.
            for hook in self._hooks:
                hook.reset_cache()
            take_all_blocks(self)  # type: ignore[arg-type]
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        asked = self._inside_schedule and bool(self._hooks)
        kept = asked and self._keep(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if kept:
            self._headroom.note_saved(request, self.current_step)  # type: ignore[attr-defined]
        elif asked:
            self._fall_back(request)

    def _keep(self, request: Request) -> bool:
        self.recompute_counters["preempted"] += 1
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)  # type: ignore[attr-defined]
        num_computed_tokens = request.num_computed_tokens
        for hook in self._hooks:
            if hook.update_state_before_preempt(request, block_ids, num_computed_tokens):
                self.recompute_counters["offloaded"] += 1
                logger.info(
                    "Recompute preemption offload enabled for request %s: %d tokens",
                    request.request_id,
                    num_computed_tokens,
                )
                return True
        return False

    def _fall_back(self, request: Request) -> None:
        if self._fallback.resends(request):
            self._to_resend.append(request)
            return
        self.recompute_counters["recomputed"] += 1
        reason = self._fallback.why_not(request) if self._fallback.resend else None
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            logger.warning(
                "%s is resend, but request %s is recomputed here: %s. Further such requests are not logged.",
                FALLBACK,
                request.request_id,
                reason,
            )

    def _end_for_resend(self) -> None:
        """End the requests that a proxy shall send to Prefill again; vLLM's loop must not see them vanish under it."""
        for request in self._to_resend:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_STOPPED)  # type: ignore[attr-defined]
            self.recompute_counters["resent"] += 1
            logger.info("Request %s ends here to be sent to Prefill again", request.request_id)
        self._resent += self._to_resend
        self._to_resend = []

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for request in self._resent:
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.STOP,
                    stop_reason=STOP_REASON,
                    trace_headers=request.trace_headers,
                )
            )
        self._resent = []
        return outputs
