"""Which dimension of a KV cache tensor counts the blocks, where its shape alone does not tell."""

from collections.abc import Mapping

import torch


def block_dims(
    kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]],
    num_blocks: int,
    block_strides: Mapping[str, int],
) -> dict[str, int]:
    """Return the block dimension by layer, for layers whose tensor has several dimensions that could count blocks.

    Args:
        kv_caches: as vLLM registers them.
        num_blocks: of the device, null block included.
        block_strides: by layer, bytes from one block to the next, or twice that where K and V lie apart; from vLLM's
            KVCacheConfig.
    """
    found = {}
    for layer, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor) or layer not in block_strides:
            continue
        possible = [dim for dim, size in enumerate(tensor.shape) if size % num_blocks == 0 and size]
        if len(possible) < 2:
            continue
        strides = {
            dim: tensor.stride(dim) * tensor.element_size() * tensor.shape[dim] // num_blocks for dim in possible
        }
        for expected in (block_strides[layer], block_strides[layer] // 2):
            fitting = [dim for dim, stride in strides.items() if stride == expected]
            if len(fitting) == 1:
                found[layer] = fitting[0]
                break
    return found
