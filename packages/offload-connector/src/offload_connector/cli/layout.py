"""How vLLM cuts a model's KV cache into blocks: bytes of a block on each rank, and blocks that a request takes.

The rules are those of vLLM 0.32's `v1/core/kv_cache_utils.py` (groups, one page size for all) and
`platforms/interface.py` (`_align_hybrid_block_size`); the tests hold this module against vLLM itself.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    FULL = "full attention"
    WINDOW = "sliding window"
    STATE = "recurrent state"


@dataclass(frozen=True)
class Layer:
    """What one layer keeps on one rank.

    Attributes:
        kind: what of a request's tokens it keeps.
        nbytes: bytes per token of an attention layer; bytes of the whole state of a recurrent one.
        position: the decoder layer it belongs to, which says its pipeline stage.
        window: tokens that a sliding-window layer sees.
    """

    kind: Kind
    nbytes: int
    position: int
    window: int = 0


@dataclass(frozen=True)
class Group:
    """Layers that share one block table (a KV cache group)."""

    kind: Kind
    layers: tuple[Layer, ...]

    def blocks(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that a request of `num_tokens` computed tokens has to store for this group."""
        if self.kind is Kind.STATE:
            return 1
        blocks = -(-num_tokens // block_size)
        if self.kind is Kind.WINDOW:
            # The window's first token may lie anywhere in its block, hence one more.
            blocks = min(blocks, -(-(self.layers[0].window - 1) // block_size) + 1)
        return blocks


@dataclass(frozen=True)
class Layout:
    """A model's KV cache blocks.

    Attributes:
        block_size: tokens per block of the attention layers.
        groups: all layers of the model, over every pipeline stage.
        stage_block_bytes: bytes of one block on a rank of each pipeline stage.
    """

    block_size: int
    groups: tuple[Group, ...]
    stage_block_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the rank where it is largest; that rank's budget holds the fewest blocks."""
        return max(self.stage_block_bytes)

    def blocks(self, num_tokens: int) -> int:
        """The most host blocks that a preempted request of `num_tokens` computed tokens takes."""
        return sum(group.blocks(num_tokens, self.block_size) for group in self.groups)


def make_layout(layers: Sequence[Layer], block_size: int, num_positions: int, stages: int) -> Layout:
    """Group the layers and add up their pages.

    Args:
        layers: of the whole model; their attention layers must have the same bytes per token.
        block_size: vLLM's `--block-size`; raised here, as vLLM raises it, until a recurrent state fits a page.
        num_positions: decoder layers of the model, which the pipeline stages share out.
        stages: pipeline-parallel size.
    """
    per_token = {layer.nbytes for layer in layers if layer.kind is not Kind.STATE}
    assert len(per_token) == 1, f"attention layers of several sizes: {sorted(per_token)}"
    (token_bytes,) = per_token
    state = max((layer.nbytes for layer in layers if layer.kind is Kind.STATE), default=0)
    if state:
        block_size *= max(1, -(-state // (block_size * token_bytes)))
    page = block_size * token_bytes
    groups = _groups(layers)
    stage_bytes = tuple(
        page * max(sum(layer.position in stage for layer in group.layers) for group in groups)
        for stage in pipeline_stages(num_positions, stages)
    )
    return Layout(block_size, groups, stage_bytes)


def _groups(layers: Sequence[Layer]) -> tuple[Group, ...]:
    """Share each kind's layers out over groups of equal size, so that a block has the same bytes in every group."""
    kinds: dict[tuple[Kind, int], list[Layer]] = {}
    for layer in layers:
        kinds.setdefault((layer.kind, layer.window), []).append(layer)
    counts = [len(members) for members in kinds.values()]
    # A few layers more of one kind are cheaper as padding than as further groups: vLLM draws the line at 1.5.
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for (kind, _), members in kinds.items():
        number = -(-len(members) // size)
        groups += [Group(kind, tuple(members[first::number])) for first in range(number)]
    return tuple(groups)


def pipeline_stages(num_positions: int, stages: int) -> list[range]:
    """The decoder layers of each pipeline stage, as vLLM's `get_pp_indices` shares them out.

    What does not divide goes to the stages from the last but one backwards; the last stage has an output layer to hold.
    """
    sizes = [num_positions // stages] * stages
    for back in range(num_positions % stages):
        sizes[-2 - back] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
