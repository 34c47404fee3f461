"""The preemption hook: how a scheduler finds what keeps the KV cache of a preempted request.

Any KV connector may offer it; nothing needs to be inherited. The names and arguments are those that vllm-ascend's
recompute scheduler calls, so a connector that serves one serves the other.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from recompute_scheduler._vllm import Request

HOOK = "update_state_before_preempt"


@runtime_checkable
class PreemptionHook(Protocol):
    """What the scheduler calls on a connector."""

    def update_state_before_preempt(
        self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Keep the KV cache of `request`, whose device blocks vLLM frees right after this call.

        Args:
            request: the request about to be preempted, still RUNNING; or one that waits with KV in blocks of its own
                and gives them up, because requests that wait hold the whole cache.
            block_ids: its block table, one list of device block ids per KV cache group; 0 is the null block.
            num_computed_tokens: tokens whose KV the engine has scheduled to be in those blocks.

        Returns:
            True when the KV is safe, or will be once this step's connector metadata is carried out; False when nothing
            was kept and the request must be recomputed.
        """
        ...

    def reset_cache(self) -> bool | None:
        """Forget what was kept: its KV is no longer valid. vLLM's connectors have it; None says there is no cache."""
        ...


@runtime_checkable
class HeedsLoadFailurePolicy(Protocol):
    """What the scheduler calls once, at the start, on a hook that has it."""

    def set_load_failure_policy(self, recompute: bool) -> None:
        """Say what becomes of a request whose KV could not be loaded: it is computed again, or ends with an error.

        Either way a step in which the load failed puts out nothing for it. With overlapping steps only the end is
        complete: a token that the next step computes on top is dropped with the request, not otherwise.
        """
        ...


def find_hooks(connector: object | None) -> list[PreemptionHook]:
    """Return the connectors that offer the hook: `connector` itself, else the children of a multi connector.

    A multi connector that dispatches the hook on its own, as vllm-ascend's does, is taken as it is.
    """
    if connector is None:
        return []
    if isinstance(connector, PreemptionHook):
        return [connector]
    return [hook for child in _children(connector) for hook in find_hooks(child)]


def _children(connector: object) -> Iterator[object]:
    yield from getattr(connector, "sub_connectors", None) or getattr(connector, "_connectors", ())
