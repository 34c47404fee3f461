"""Stands for the parts of vllm-ascend 0.23 that meet our connector.

The package itself imports torch-npu wherever it is touched and is published for Ascend hosts only, so it cannot be
loaded here. This is written anew from what its sources do: the registration of connectors, the multi connector, and
what its recompute scheduler makes of the preemption hook.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

NAME = "RecomputeCPUOffloadConnector"


def register_connector():
    """Its plugin: MultiConnector is replaced, the other names are registered and must be free."""
    KVConnectorFactory._registry.pop("MultiConnector", None)
    KVConnectorFactory.register_connector("MultiConnector", "ascend_double", "AscendMultiConnector")
    KVConnectorFactory.register_connector(NAME, "ascend_double", "RecomputeCPUOffloadConnectorV1")


class RecomputeCPUOffloadConnectorV1:
    """Its connector of the same name."""


class AscendMultiConnector(MultiConnector):
    """Asks whoever holds a preempted request first, and hands the preemption hook to every child that has it."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        for index, child in enumerate(self._connectors):
            holds = getattr(child, "has_preempted_request", None)
            if holds is None or not holds(request.request_id):
                continue
            tokens, behind = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if tokens:
                self._requests_to_connector[request.request_id] = index
                return tokens, behind
            break
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        chosen = self._requests_to_connector.get(request.request_id, -1)
        for index, child in enumerate(self._connectors):
            if index == chosen:
                child.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                child.update_state_after_alloc(request, blocks.new_empty(), 0)

    def update_state_before_preempt(self, request, block_ids, num_computed_tokens):
        hooks = [getattr(child, "update_state_before_preempt", None) for child in self._connectors]
        answers = [hook(request, block_ids, num_computed_tokens) for hook in hooks if hook is not None]
        return any(answers)


class _Recompute:
    """What its loop, a copy of vLLM's, does with a victim: keep it if the hook says so, else end it for a resend."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._dropped = []

    def schedule(self, *args, **kwargs):
        scheduled = super().schedule(*args, **kwargs)
        for request in self._dropped:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return scheduled

    def _preempt_request(self, request, *args, **kwargs):
        hook = getattr(self.connector, "update_state_before_preempt", None)
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        kept = hook is not None and bool(hook(request, block_ids, request.num_computed_tokens))
        super()._preempt_request(request, *args, **kwargs)
        if not kept:
            self._dropped.append(request)

    def update_from_output(self, *args, **kwargs):
        outputs = super().update_from_output(*args, **kwargs)
        for request in self._dropped:
            end = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.STOP, stop_reason="recomputed")
            outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(end)
        self._dropped = []
        return outputs


class RecomputeScheduler(_Recompute, Scheduler):
    pass


class AsyncRecomputeScheduler(_Recompute, AsyncScheduler):
    pass
