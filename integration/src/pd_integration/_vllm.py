"""Everything of the harness that depends on vLLM's version.

What a version has is looked up by name, not told by its number. Differences that the packages have to deal with are in
their own modules of this name; this one takes them from there.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from offload_connector._vllm import (
    FAILED_LOADS_BY_BLOCK,
    HITS_MAY_BE_TAKEN,
    LOSES_COUNT_OF_DRAFTS,
    KVConnectorTransferResults,
)

__all__ = [
    "FAILED_LOADS_BY_BLOCK",
    "FREES_BLOCKS_IN_FLIGHT",
    "FREES_WINDOWS_TOO_EARLY",
    "HITS_MAY_BE_TAKEN",
    "LOSES_COUNT_OF_DRAFTS",
    "NEEDS_WHOLE_BLOCKS",
    "KVConnectorTransferResults",
    "block_copies",
]

FREES_BLOCKS_IN_FLIGHT = not hasattr(Scheduler, "_drain_deferred_frees")
"""vLLM 0.23 hands a request's blocks to the next one while a step that writes them may still run."""

FREES_WINDOWS_TOO_EARLY = (
    "processed_computed_tokens" not in inspect.signature(KVCacheManager.remove_skipped_blocks).parameters
)
"""vLLM 0.23 takes every draft in flight for accepted when it frees what has left a window; some of it comes back in."""

NEEDS_WHOLE_BLOCKS = LOSES_COUNT_OF_DRAFTS
"""Before 0.32 vLLM computes states that are kept at block boundaries by whole blocks: a smaller budget gets nowhere."""


def block_copies(scheduled: Any) -> list[Any]:
    """Return the copies of whole blocks that a step asks its workers for; vLLM 0.23 never asks."""
    return list(getattr(scheduled, "kv_cache_block_copies", None) or ())
