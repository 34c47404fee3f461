"""Host blocks for the device blocks of one request: shared where the prefix index has them, else new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from block_mapper.groups import GroupKind, KVGroup
from block_mapper.pool import NULL_BLOCK, HostPool, HostPoolFull
from block_mapper.runs import Int64Array

Hashes = Sequence[Sequence[bytes | None]]
PrefixKey = tuple[int, bytes]


def prefix_keys(
    groups: Sequence[KVGroup], positions: Sequence[Int64Array], num_tokens: int, hashes: Hashes | None
) -> list[PrefixKey | None]:
    """Prefix index key, (group index, hash), of each block to store; empty without hashes.

    None for what must not be shared: a block without a hash, one that num_tokens tokens do not fill, a recurrent state.
    ValueError when a hash occurs twice in a group.
    """
    if hashes is None:
        return []
    if len(hashes) != len(groups):
        raise ValueError(f"{len(hashes)} hash lists for {len(groups)} groups: give one per group, in order")
    keys: list[PrefixKey | None] = []
    for index, (group, at, known) in enumerate(zip(groups, positions, hashes, strict=True)):
        full = 0 if group.kind is GroupKind.RECURRENT else min(num_tokens // group.block_size, len(known))
        of_group = [known[p] if p < full else None for p in at.tolist()]
        shareable = [h for h in of_group if h is not None]
        if len(set(shareable)) != len(shareable):
            raise ValueError(f"group {index} has the same hash twice: a block's hash must cover all of its prefix")
        keys += [None if h is None else (index, h) for h in of_group]
    return keys


def hold(pool: HostPool, device: Int64Array, keys: Sequence[PrefixKey | None]) -> tuple[Int64Array, NDArray[np.bool_]]:
    """A host block, held once, for each block of device, and which of them are new and have to be written.

    device int64 [n]; keys as from prefix_keys. HostPoolFull: nothing changed.
    """
    host = pool.lookup(keys) if keys else np.full(len(device), NULL_BLOCK, np.int64)
    new = host == NULL_BLOCK
    shared = host[~new]
    pool.retain(shared)
    try:
        allocated = pool.allocate(int(new.sum()))
    except HostPoolFull:
        pool.free(shared)
        raise
    # Host ids rise with device ids, not with positions: neighbours on the device become one copy.
    host[np.flatnonzero(new)[np.argsort(device[new])]] = allocated
    if keys:
        fresh = [i for i in np.flatnonzero(new).tolist() if keys[i] is not None]
        pool.publish([keys[i] for i in fresh], host[fresh])
    return host, new
