"""`enable_offload_prefix_caching`: under which hashes the full blocks of a request may be shared."""

from collections.abc import Hashable, Sequence

from block_mapper import KVGroup
from offload_connector._vllm import KVCacheConfig, Request


class PrefixHashes:
    """Hashes of a request's full blocks, per KV cache group.

    Args:
        groups: as block-mapper knows them, in vLLM's order.
        kv_cache_config: vLLM's; says which groups hold draft layers.
        hash_block_size: tokens per hash of vLLM's prefix cache; it divides every group's block size.
    """

    def __init__(self, groups: Sequence[KVGroup], kv_cache_config: KVCacheConfig, hash_block_size: int) -> None:
        self._groups = [
            (group.block_size, group.block_size // hash_block_size, vllm_group.is_eagle_group)
            for group, vllm_group in zip(groups, kv_cache_config.kv_cache_groups, strict=True)
        ]

    def of(self, request: Request) -> list[list[Hashable]]:
        """Return, per group, one hash for each full block in logical order.

        vLLM's hashes are chained: the one at the end of a block stands for all tokens up to there.
        """
        tokens = request.all_token_ids
        hashes: list[list[Hashable]] = []
        for block_size, per_block, drafts in self._groups:
            # Where vLLM hashes more than a block at once, none of it can be told from a prefix.
            ends = request.block_hashes[per_block - 1 :: per_block] if per_block else []
            if drafts:
                # A draft layer's KV at a position is computed from the token after it: the last one of a block depends
                # on the first token of the next.
                following = [tokens[n * block_size] for n in range(1, len(ends) + 1) if n * block_size < len(tokens)]
                hashes.append(list(zip(ends, following, strict=False)))
            else:
                hashes.append(list(ends))
        return hashes
