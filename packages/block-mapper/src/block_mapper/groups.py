"""KV cache groups: which logical positions of a block table the next token needs.

SLIDING_WINDOW, block_size 4, window 8, 15 tokens computed

token      0 . . 3 | 4 . . 7 | 8 . . 11 | 12 . 14 (15 = next)
position      0    |    1    |    2     |    3
table         0    |    0    |   20     |   21
                             ^-- needed(15) = range(2, 4)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GroupKind(str, Enum):
    """How the layers of a group use the KV cache. Latent attention (MLA) is FULL: one block per block of tokens."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"


class UnsupportedGroup(ValueError):
    """This group, or this block table of it, cannot be saved and restored exactly; use the fallback."""


_WINDOWED = (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)


@dataclass(frozen=True)
class KVGroup:
    """One KV cache group.

    kind: a GroupKind or its value; anything else raises UnsupportedGroup.
    block_size: tokens per block (for RECURRENT: tokens per table position, vLLM's mamba block size).
    window: tokens of the sliding window, or of the attention chunk; for those two kinds only.
    speculative_blocks: state slots behind the running one (vLLM's MambaSpec.num_speculative_blocks); RECURRENT only.
    """

    kind: GroupKind
    block_size: int
    window: int | None = None
    speculative_blocks: int = 0

    def __post_init__(self) -> None:
        try:
            kind = GroupKind(self.kind)
        except ValueError:
            reason = (
                "its blocks hold the encoder's output, not the request's tokens"
                if "cross" in str(self.kind).lower()
                else f"known kinds: {', '.join(k.value for k in GroupKind)}"
            )
            raise UnsupportedGroup(f"KV cache group kind {self.kind!r} cannot be saved: {reason}") from None
        object.__setattr__(self, "kind", kind)
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}: give the tokens per block, at least 1")
        if kind in _WINDOWED and (self.window is None or self.window < 1):
            raise ValueError(f"window is {self.window}: a {kind.value} group needs its size in tokens, at least 1")
        if kind not in _WINDOWED and self.window is not None:
            raise ValueError(f"window is {self.window}: a {kind.value} group has none, leave it out")
        if self.speculative_blocks < 0 or (self.speculative_blocks and kind is not GroupKind.RECURRENT):
            raise ValueError(
                f"speculative_blocks is {self.speculative_blocks}: "
                f"it must be 0 for a {kind.value} group, and never negative"
            )

    @property
    def windowed(self) -> bool:
        """Whether blocks before the window may be null."""
        return self.kind in _WINDOWED

    def num_positions(self, num_tokens: int) -> int:
        """Logical positions that hold num_tokens tokens, the last one perhaps partly filled."""
        return -(-num_tokens // self.block_size)

    def needed(self, num_tokens: int) -> range:
        """Logical positions with computed tokens that token num_tokens reads or is written behind, num_tokens >= 1.

        The first one is vLLM's get_num_skipped_tokens(num_tokens) // block_size
        (vllm/v1/core/single_type_kv_cache_manager.py), so a table that vLLM has allocated holds all of them.
        """
        return range(self._skipped_tokens(num_tokens) // self.block_size, self.num_positions(num_tokens))

    def _skipped_tokens(self, num_tokens: int) -> int:
        if self.kind is GroupKind.FULL:
            return 0
        if self.kind is GroupKind.RECURRENT:
            return num_tokens - 1
        assert self.window is not None
        if self.kind is GroupKind.SLIDING_WINDOW:
            return max(0, num_tokens - self.window + 1)
        return num_tokens // self.window * self.window

    def fewest_tokens(self, first_position: int, num_tokens: int) -> int:
        """Least n >= 1 such that positions first_position and up serve every resume at n .. num_tokens tokens."""
        if self.kind is GroupKind.RECURRENT:
            return num_tokens  # the state after fewer tokens is gone
        if first_position == 0:
            return 1
        assert self.window is not None
        first_token = first_position * self.block_size
        if self.kind is GroupKind.SLIDING_WINDOW:
            return first_token + self.window - 1
        return -(-first_token // self.window) * self.window


def recurrent_resume_point(
    computed_before: int, scheduled: int, drafts: int, computed_now: int, block_size: int
) -> tuple[int, int]:
    """Where a request with recurrent groups can resume after a step with draft tokens: (num_tokens, last_step_end).

    A step leaves the states of its draft positions in the speculative slots, and only the worker's
    num_accepted_tokens tells which one counts; the convolution state sits shifted inside the first slot. A resumed
    request starts with num_accepted_tokens = 1: it reads the first slot, unshifted. That slot holds the state before
    any draft token, so we resume there, and the few accepted drafts are computed again. One exception: when all
    drafts were accepted and end on a block boundary, vLLM has moved the final state into the first slot.
    (vllm/v1/worker/mamba_utils.py, preprocess_mamba and postprocess_mamba_fused_kernel.)

    computed_before, scheduled, drafts: the request's num_computed_tokens before its last step, the tokens scheduled
    in that step with drafts, and the drafts among them. computed_now: num_computed_tokens once rejected drafts are
    taken off. block_size: that of the recurrent groups. Pass both results to SavedRequests.save.
    """
    end = computed_before + scheduled
    first_slot = end - drafts
    if not (0 <= drafts < scheduled and first_slot <= computed_now <= end):
        raise ValueError(
            f"computed_now is {computed_now}: a step from {computed_before} with {scheduled} tokens, {drafts} of them "
            f"drafts, ends between {first_slot} and {end}"
        )
    if computed_now == end and end % block_size == 0:
        return end, end
    return first_slot, end
