"""When a saved request comes back: not before the running ones have room to grow.

A saved request fits as soon as its blocks are free. Taken in at once it fills the cache again, and a few steps later
somebody is preempted again: blocks are copied to and fro and nobody gets far. So while a saved request waits, vLLM's
admission keeps some blocks free (its own watermark, which never applies when nothing runs):

    free blocks  |<- its blocks ->|<- growth of the running requests over the next GROWTH_TOKENS tokens each ->|
                                                                 shrinks to nothing as the wait goes on

What is kept free shrinks with the time that the longest waiting saved request has waited, so that nobody starves.
"""

from collections.abc import Iterable

from recompute_scheduler._vllm import FullAttentionSpec, KVCacheConfig, Request, RequestStatus, UniformTypeKVCacheSpecs

MOST_EAGER = 1.0
GROWTH_TOKENS = 128
"""Tokens by which every running request shall be able to grow before the cache is full again."""

PATIENCE_STEPS = 12
"""Steps of waiting, for each saved request in the queue, after which nothing is kept free for the others.

Both were chosen on traces of 1.25, 2 and 4 times the cache, see bench/thrash.py: larger values mean fewer preemptions
and longer waits."""


class Headroom:
    """How many blocks vLLM's admission shall keep free; one per scheduler.

    Args:
        kv_cache_config: vLLM's; only full attention takes more blocks as a request grows.
        watermark_blocks: what the operator has set as vLLM's watermark, the least that is ever kept free.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, watermark_blocks: int) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        growing = [spec for spec in specs if isinstance(spec, FullAttentionSpec | UniformTypeKVCacheSpecs)]
        self._blocks_per_token = sum(1 / spec.block_size for spec in growing)
        self._watermark_blocks = watermark_blocks
        self._waiting: dict[str, tuple[Request, int]] = {}

    def note_saved(self, request: Request, step: int) -> None:
        """`request` was preempted in `step`, and its KV is kept."""
        self._waiting[request.request_id] = (request, step)

    def blocks(self, running: Iterable[Request], step: int) -> int:
        """Return the blocks to keep free in `step`."""
        if self._waiting:
            self._waiting = {
                name: entry for name, entry in self._waiting.items() if entry[0].status is RequestStatus.PREEMPTED
            }
        if not self._waiting:
            return self._watermark_blocks
        waited = step - min(since for _, since in self._waiting.values())
        eagerness = min(MOST_EAGER, waited / (PATIENCE_STEPS * len(self._waiting) ** 2))
        growth = sum(1 for _ in running) * GROWTH_TOKENS * self._blocks_per_token
        return max(self._watermark_blocks, int(growth * (1 - eagerness)))
