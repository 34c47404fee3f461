"""Preempt a vLLM Decode request without losing its KV cache.

`RecomputeScheduler` and `AsyncRecomputeScheduler` are vLLM's own schedulers plus one hook: just before vLLM frees the
blocks of a request that it preempts for want of KV cache, the KV connector is asked to keep them.
"""

from recompute_scheduler._vllm import AsyncScheduler, Scheduler
from recompute_scheduler.preemption import RecomputePreemption

__version__ = "0.1.0"
__all__ = ["AsyncRecomputeScheduler", "RecomputePreemption", "RecomputeScheduler"]


class RecomputeScheduler(RecomputePreemption, Scheduler):
    """vLLM's `Scheduler` with the preemption hook."""


class AsyncRecomputeScheduler(RecomputePreemption, AsyncScheduler):
    """vLLM's `AsyncScheduler` with the preemption hook."""
