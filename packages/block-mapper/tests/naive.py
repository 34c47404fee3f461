"""The naive model of the stateful test: contents of blocks, and what it remembers of requests and copies."""

from dataclasses import dataclass, field

from block_mapper import GroupKind, KVGroup, State

GROUPS = (
    KVGroup(GroupKind.FULL, 4),
    KVGroup(GroupKind.SLIDING_WINDOW, 2, window=7),
    KVGroup(GroupKind.CHUNKED_LOCAL, 3, window=6),
    KVGroup(GroupKind.RECURRENT, 8),
)
RANKS = 2
POOL = 40
Content = tuple[object, ...]


def visible(group: KVGroup, token: int) -> range:
    """Earlier tokens that the token attends to (for a recurrent group: whose block holds the state)."""
    if group.kind is GroupKind.RECURRENT:
        return range(token - 1, token)
    if group.window is None:
        return range(token)
    if group.kind is GroupKind.SLIDING_WINDOW:
        return range(max(0, token - group.window + 1), token)
    return range(token // group.window * group.window, token)


def content(index: int, family: int, position: int, num_tokens: int) -> Content:
    """Contents of a block after num_tokens tokens; a token that was not computed leaves a hole."""
    group = GROUPS[index]
    if group.kind is GroupKind.RECURRENT:
        return (("state", family, num_tokens),)
    tokens = range(position * group.block_size, (position + 1) * group.block_size)
    return tuple((index, family, t) if t < num_tokens else None for t in tokens)


@dataclass
class Request:
    """What the model remembers of a saved request. held: its host blocks. waits_for: jobs before the next state."""

    family: int
    num_tokens: int
    state: State
    waits_for: set[int]
    held: set[int] = field(default_factory=set)
    device: list[list[int]] = field(default_factory=list)
    loading: int = 0


@dataclass
class Copy:
    """A job in flight: for a store (device contents, host block), for a load (host block, device block, expected)."""

    is_load: bool
    stores: list[tuple[Content, int]] = field(default_factory=list)
    loads: list[tuple[int, int, Content]] = field(default_factory=list)
    reports: int = 0
    failed: bool = False
    blocks: list[int] = field(default_factory=list)
