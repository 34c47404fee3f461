"""Which loads may run within their step: small ones whose failure can be taken back.

A load within its step is read by the step's forward. Should it fail, nothing that follows from it may stay:

- vLLM finds the request by the ids of its bad blocks, and ends it or goes back to the first of them. That takes a
  single KV cache group, and full attention: the other kinds no longer have what the tokens from there on need.
- With prefix caching the blocks are in the cache as soon as the step is scheduled. Others may have read them, and they
  stay when their request is gone before the failure is known.
- When steps overlap, the next step has been scheduled on top. Its token can be dropped with its request, but the
  request can't go back.
"""

from collections.abc import Sequence

from block_mapper import GroupKind, KVGroup

LOAD_WITHIN_STEP_BYTES = 32 << 20
"""Loads up to this size run within their step. At 20 GB/s, an A3 card's host link, they hold it up for 1.6 ms; a load
behind the step costs its request one step more at least, 20 to 50 ms for the models this is for."""


class WithinStep:
    """The choice, load by load; one per engine.

    Args:
        groups: the model's KV cache groups.
        prefix_caching: whether the device's blocks are shared by prefix.
        overlapping_steps: whether a step is scheduled before the one before it has ended.
    """

    def __init__(
        self, groups: Sequence[KVGroup], prefix_caching: bool = False, overlapping_steps: bool = False
    ) -> None:
        self._can_be_found = not prefix_caching and [group.kind for group in groups] == [GroupKind.FULL]
        self._overlapping_steps = overlapping_steps
        # Until the scheduler has said otherwise, as one that knows nothing of us never does.
        self._goes_back = True

    def set_failure_policy(self, recompute: bool) -> None:
        """Take note of vLLM's kv_load_failure_policy: go on from before the failed load, or end the request."""
        self._goes_back = recompute

    def allows(self, num_bytes: int) -> bool:
        """Whether a load of `num_bytes` per rank runs within its step."""
        if not self._can_be_found or (self._overlapping_steps and self._goes_back):
            return False
        return num_bytes <= LOAD_WITHIN_STEP_BYTES
