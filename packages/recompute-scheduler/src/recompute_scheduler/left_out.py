"""Running requests that vLLM leaves out of a step, and models that do not bear it.

While the blocks of the next victim are written by a step in flight, vLLM ends the step it schedules: whoever comes
later in the queue sits it out. The workers drop such a request from their batch and take it in again one step later,
and with it goes the number of drafts that were accepted last. With recurrent states and speculative decoding that
number says in which slot the state is: the request goes on from another state, and its tokens are wrong from there on.
"""

from recompute_scheduler._vllm import VICTIMS_MAY_BE_IN_FLIGHT, Scheduler


def may_lose_its_state(scheduler: Scheduler) -> bool:
    """Whether a request of this scheduler may be left out of a step and then go on from another recurrent state."""
    # vLLM before 0.32 preempts more requests instead.
    if VICTIMS_MAY_BE_IN_FLIGHT or not scheduler.defer_block_free:
        return False
    groups = scheduler.kv_cache_config.kv_cache_groups
    return any(getattr(group.kv_cache_spec, "num_speculative_blocks", 0) for group in groups)
