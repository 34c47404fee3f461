"""Everything of the harness that depends on vLLM's version.

What a version has is looked up by name, not told by its number. Differences that the packages have to deal with are in
their own modules of this name; this one takes them from there.
"""

from __future__ import annotations

from typing import Any

from offload_connector._vllm import FAILED_LOADS_BY_BLOCK, KVConnectorTransferResults

__all__ = ["FAILED_LOADS_BY_BLOCK", "KVConnectorTransferResults", "block_copies"]


def block_copies(scheduled: Any) -> list[Any]:
    """Return the copies of whole blocks that a step asks its workers for; vLLM 0.23 never asks."""
    return list(getattr(scheduled, "kv_cache_block_copies", None) or ())
