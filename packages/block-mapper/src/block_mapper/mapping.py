"""Which blocks of a block table are stored, and which are loaded back.

Logical positions are never compressed: position p of every table, on both sides, is the same tokens, and null stays
null in place.

                          position     0     1     2     3     4
    store   15 tokens   device table   0     0    20    21    22      22 is lookahead: nothing computed in it
                          host table   0     0     7     8
    load    15 tokens      new table   0     0    31    30    35      pairs (7, 31) (8, 30); 35 is left alone
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from block_mapper.groups import GroupKind, KVGroup, UnsupportedGroup
from block_mapper.pool import NULL_BLOCK
from block_mapper.runs import Int64Array


def as_table(group: KVGroup, table: Sequence[int] | Int64Array, num_tokens: int) -> Int64Array:
    """A block table as int64 array, aligned to logical positions.

    A windowed group's table with fewer positions than num_tokens takes, none of them null, holds only the window's
    tail: it ends at the position of the last of num_tokens tokens, and null blocks are put in front. (A short table
    with nulls starts at position 0 and lacks its end; it stays as it is, to be refused where a block is needed.)
    """
    blocks = np.asarray(table)
    if blocks.ndim != 1 or (blocks.size and blocks.dtype.kind not in "iu"):
        raise ValueError(f"a block table must be a flat sequence of block ids, got {table!r:.100}")
    if blocks.size and blocks.min() < 0:
        raise ValueError(f"block table holds the negative block id {blocks.min()}")
    blocks = blocks.astype(np.int64)
    missing = group.num_positions(num_tokens) - len(blocks)
    if missing > 0 and group.windowed and blocks.all():
        blocks = np.concatenate((np.full(missing, NULL_BLOCK, np.int64), blocks))
    return blocks


def blocks_to_store(
    group: KVGroup, table: Int64Array, num_tokens: int, last_step_end: int
) -> tuple[Int64Array, Int64Array]:
    """What a request needs to resume after num_tokens computed tokens: (device blocks, logical positions).

    Attention: every block that holds a computed token, the partial last one too. Recurrent state: one block, the
    first slot of the last step (recurrent_resume_point says why), kept at the position where the resumed request
    reads it. UnsupportedGroup when a block that the next token needs is null or beyond the table.
    """
    if group.kind is GroupKind.RECURRENT:
        source = np.array([(last_step_end - 1) // group.block_size])
        _require(group, table, source, num_tokens, UnsupportedGroup)
        return table[source], _needed(group, num_tokens)
    _require(group, table, _needed(group, num_tokens), num_tokens, UnsupportedGroup)
    positions = np.flatnonzero(table[: group.num_positions(num_tokens)])
    return table[positions], positions


def to_host_table(group: KVGroup, positions: Int64Array, blocks: Int64Array, num_tokens: int) -> Int64Array:
    """Host blocks of the stored positions as a host table: int64 [positions of num_tokens tokens], null elsewhere."""
    table = np.full(group.num_positions(num_tokens), NULL_BLOCK, np.int64)
    table[positions] = blocks
    return table


def blocks_to_load(
    group: KVGroup, host_table: Int64Array, table: Int64Array, num_tokens: int, device_tokens: int
) -> tuple[Int64Array, Int64Array]:
    """What to copy to make tokens device_tokens .. num_tokens valid: (host blocks, device blocks).

    Only positions stored in host_table and present in table; positions wholly inside device_tokens are on the device
    already. ValueError when table has no block where the next token needs one: the request would go on with KV that
    nobody wrote.
    """
    _require(group, table, _needed(group, num_tokens), num_tokens, ValueError)
    used = slice(device_tokens // group.block_size, min(group.num_positions(num_tokens), len(table)))
    host, device = host_table[used], table[used]
    both = (host != NULL_BLOCK) & (device != NULL_BLOCK)
    return host[both], device[both]


def fewest_tokens(group: KVGroup, host_table: Int64Array, num_tokens: int) -> int:
    """Least number of tokens that host_table, stored at num_tokens, can restore: what is in front was not kept."""
    nulls = np.flatnonzero(host_table == NULL_BLOCK)
    return group.fewest_tokens(int(nulls[-1]) + 1 if len(nulls) else 0, num_tokens)


def _needed(group: KVGroup, num_tokens: int) -> Int64Array:
    needed = group.needed(num_tokens)
    return np.arange(needed.start, needed.stop)


def _require(group: KVGroup, table: Int64Array, needed: Int64Array, num_tokens: int, error: type[ValueError]) -> None:
    within = needed[needed < len(table)]
    missing = np.concatenate((needed[needed >= len(table)], within[table[within] == NULL_BLOCK]))
    if missing.size:
        raise error(
            f"{group.kind.value} block table of {len(table)} positions has no block at position {missing.min()}, "
            f"which the token after {num_tokens} computed tokens needs: pass the whole table and the right num_tokens"
        )
