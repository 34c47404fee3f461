"""When a saved request comes back: not before the running ones have room to grow.

A saved request fits as soon as its blocks are free. Taken in at once it fills the cache again, and a few steps later
somebody is preempted again: blocks are copied to and fro and nobody gets far. So while a saved request waits, vLLM's
admission keeps some blocks free (its own watermark, which never applies when nothing runs):

    free blocks  |<- its blocks ->|<- growth of the running requests by a share of their present length ->|
                                     more if many wait; shrinks to LEAST_GROWTH, then to 0, as the wait goes on

The longer saved requests wait, and the fewer they are, the less is kept free, so that nobody starves; and when nothing
runs, nothing is.
"""

from collections.abc import Sequence

from recompute_scheduler._vllm import FullAttentionSpec, KVCacheConfig, Request, RequestStatus, UniformTypeKVCacheSpecs

GROWTH = 0.6
"""Running requests shall be able to grow by this share of their length, at most, before the cache is full again."""

ALONE = 0.06
"""That share when one saved request waits; n * n times as much when n do, for then the cache is far too small. One
alone comes back soon: held back for the growth of all, it waits in vain beside blocks that nobody uses."""

LEAST_GROWTH = 0.08
"""What is left of that once patience is at its end: with less, the request just resumed is preempted again at once."""

PATIENCE = 0.0425
"""One saved request waits for so many steps, as a share of the running requests' mean length in tokens, until only the
least growth is kept free; n of them wait n * n times as long."""

LONGEST = 0.8
"""After so many steps, counted as above, nothing is kept free any more, however many wait.

The five were chosen on traces of short and long requests at 1.25, 2 and 4 times the cache, so that neither preemptions
nor the longest wait exceed those of vLLM's own recomputation. Larger values mean fewer preemptions and longer waits."""


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
        self.watermark_blocks = watermark_blocks
        self._waiting: dict[str, tuple[Request, int]] = {}

    def note_saved(self, request: Request, step: int) -> None:
        """`request` was preempted in `step`, and its KV is kept."""
        self._waiting[request.request_id] = (request, step)

    def blocks(self, running: Sequence[Request], step: int) -> int:
        """Return the blocks to keep free in `step`."""
        if self._waiting:
            # One whose KV has been loaded is PREEMPTED again for a moment, but has its blocks.
            self._waiting = {
                name: (request, since)
                for name, (request, since) in self._waiting.items()
                if request.status is RequestStatus.PREEMPTED and request.num_computed_tokens == 0
            }
        if not self._waiting or not running:
            return self.watermark_blocks
        length = sum(request.num_tokens for request in running)
        mean_length = length / len(running)
        many = len(self._waiting) ** 2
        patience = PATIENCE * mean_length * many
        waited = step - min(since for _, since in self._waiting.values())
        if waited > LONGEST * mean_length:
            return self.watermark_blocks
        growth = max(LEAST_GROWTH, min(GROWTH, ALONE * many) * (1 - waited / patience))
        return max(self.watermark_blocks, int(length * growth * self._blocks_per_token))
