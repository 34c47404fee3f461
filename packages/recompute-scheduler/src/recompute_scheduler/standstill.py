"""Requests that wait with blocks of their own and hold each other up.

A load behind the step takes its blocks before its request can run. vLLM lets a load in only when the loads before it
keep room to go on, but its estimate falls short for windows, and a request whose load has failed gives its blocks back
only once it is at the head of the queue. A session of streaming input whose next turn has come holds its blocks too.
Then each waits for blocks of another, nothing runs, and nothing ever will.
"""

from collections.abc import Callable

from recompute_scheduler._vllm import (
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    frees_are_deferred,
    holding_queue,
    is_in_flight,
    promote,
    requeue,
)


def is_at_standstill(scheduler: Scheduler) -> bool:
    """Whether a step that has scheduled nothing will be followed by such steps only: no event can free a block."""
    holding = _holding(scheduler)
    return (
        bool(holding)
        and not scheduler.running
        and not frees_are_deferred(scheduler)
        and scheduler.pause_state == PauseState.UNPAUSED
        and all(_has_arrived(scheduler, request) for request in holding)
        # Neither a step nor the load of an aborted request is under way.
        and not any(r.is_finished() or is_in_flight(r) for r in scheduler.requests.values())
    )


def resolve(scheduler: Scheduler, give_up: Callable[[Request], None]) -> None:
    """Let the queue move again.

    Args:
        scheduler: at a standstill.
        give_up: called with the request that gives up its blocks, if one must: its KV can still be saved.
    """
    holding = _holding(scheduler)
    # The load of these has failed: they hold nothing, and do not belong in front of those that do.
    without_blocks = [r for r in holding if r.num_computed_tokens == 0 and _is_ready(r)]
    if without_blocks:
        for request in reversed(without_blocks):
            requeue(scheduler, request)
        return
    if not holding:
        return  # they were aborted in the meantime
    last = holding[-1]
    if not _is_ready(last):
        promote(scheduler, last)
    give_up(last)
    _take_blocks(scheduler, last)


def take_all_blocks(scheduler: Scheduler) -> None:
    """Take their blocks from all requests that wait with KV in them: it must be computed again. Loads under way go on.

    vLLM takes those of running requests before it resets its cache, and fails if anybody holds some then.
    """
    for request in reversed(_holding(scheduler)):
        if _has_arrived(scheduler, request):
            if not _is_ready(request):
                promote(scheduler, request)
            _take_blocks(scheduler, request)


def _take_blocks(scheduler: Scheduler, request: Request) -> None:
    scheduler.kv_cache_manager.free(request)
    scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0
    requeue(scheduler, request)


def _holding(scheduler: Scheduler) -> list[Request]:
    """The requests in the queue of those that hold blocks, but for sessions whose next turn has not come."""
    paused = RequestStatus.WAITING_FOR_STREAMING_REQ
    return [request for request in holding_queue(scheduler) if request.status is not paused]


def _is_ready(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _has_arrived(scheduler: Scheduler, request: Request) -> bool:
    return _is_ready(request) or request.request_id in scheduler.finished_recving_kv_req_ids
