"""Find the byte regions that hold the blocks of registered KV cache tensors."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

KVCache = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]

# A layout that splits one tensor into more pieces than this is not one we know; copying it would be slow as well.
MAX_PIECES_PER_TENSOR = 4096


class UnsupportedLayout(ValueError):
    """A KV cache whose blocks cannot be proved to lie where a copy would look for them."""


@dataclass(frozen=True)
class Region:
    """The bytes of block ``b`` are ``[address + b * block_stride, + block_bytes)``, for ``0 <= b < num_blocks``.

    ``tensors`` keeps the registered tensors, and so their memory, alive.
    """

    names: tuple[str, ...]
    device: torch.device
    address: int
    num_blocks: int
    block_bytes: int
    block_stride: int
    tensors: tuple[torch.Tensor, ...] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        if len(self.names) == 1:
            return self.names[0]
        return f"{self.names[0]}..{self.names[-1]} ({len(self.names)} tensors)"

    @property
    def end(self) -> int:
        """Address just past the last block."""
        return self.address + (self.num_blocks - 1) * self.block_stride + self.block_bytes

    def block_view(self) -> torch.Tensor:
        """The blocks as uint8 ``[num_blocks, block_bytes]`` over the registered memory."""
        low, high = self.address, self.end
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() <= low and high <= storage.data_ptr() + storage.nbytes():
                flat = torch.empty(0, dtype=torch.uint8, device=self.device)
                offset = low - storage.data_ptr()
                return flat.set_(storage, offset, (self.num_blocks, self.block_bytes), (self.block_stride, 1))
        raise UnsupportedLayout(f"KV caches {self.name}: no single storage holds all blocks")


@dataclass(frozen=True)
class _Tensor:
    name: str
    tensor: torch.Tensor
    # (size, stride in bytes) of each dimension
    dims: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        t = self.tensor
        return f"{self.name!r} (shape {tuple(t.shape)}, strides {t.stride()}, {t.dtype}, offset {t.storage_offset()})"


def find_regions(
    kv_caches: Mapping[str, KVCache],
    num_blocks: int,
    *,
    block_dim: int | Mapping[str, int] | None = None,
) -> list[Region]:
    """Return the regions that together hold every byte of every block of ``kv_caches``, each byte once.

    A tensor's block dimension has ``num_blocks`` entries, or a multiple where the kernel's blocks are smaller than
    the scheduler's. Dimensions that are not dense inside a block (K and V ahead of the blocks, layers outermost,
    padded pages) give one region each; regions that overlap or touch inside every block become one.

    Args:
        kv_caches: layer name to the tensor, or the list or tuple of tensors (K and V, state tensors, scales),
            as vLLM registers them.
        num_blocks: the scheduler's number of blocks, null block 0 included; at least 2.
        block_dim: which dimension counts the blocks, for all tensors or by layer name, where a caller knows it.
            Without it a tensor with several dimensions that could count blocks is accepted only if another tensor
            over the same memory settles the question.

    Raises:
        UnsupportedLayout: no dimension, or more than one, can be the block dimension; blocks that overlap each
            other; tensors that alias the same bytes under different block ids; several devices.
        ValueError: ``num_blocks`` below 2, no tensors.
    """
    if num_blocks < 2:
        raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
    tensors = list(_tensors(kv_caches))
    if not tensors:
        raise ValueError("kv_caches holds no tensor with data: register the KV caches first")
    devices = {t.tensor.device for t in tensors}
    if len(devices) > 1:
        raise UnsupportedLayout(f"KV caches on several devices {sorted(map(str, devices))}: use one engine per device")

    settled: list[Region] = []
    ambiguous: list[tuple[_Tensor, list[list[Region]]]] = []
    for t in tensors:
        candidates = [_split(t, dim, num_blocks) for dim in _block_dims(t, num_blocks, block_dim)]
        if len({frozenset(_extent(r) for r in regions) for regions in candidates}) == 1:
            settled += candidates[0]
        else:
            ambiguous.append((t, candidates))
    for t, candidates in ambiguous:
        fitting = [c for c in candidates if all(_compatible(a, b) for a in c for b in settled if _spans_meet(a, b))]
        shares_memory = any(_spans_meet(a, b) for a in candidates[0] for b in settled)
        if not shares_memory or len(fitting) != 1:
            raise UnsupportedLayout(
                f"KV cache {t} has more than one dimension that could count {num_blocks} blocks: pass "
                f"block_dim={{{t.name.split('[')[0]!r}: <dimension>}} or change the number of blocks"
            )
        settled += fitting[0]
    return _merge(settled)


def _tensors(kv_caches: Mapping[str, KVCache]) -> Iterator[_Tensor]:
    for name, value in kv_caches.items():
        parts: Sequence[torch.Tensor] = [value] if isinstance(value, torch.Tensor) else value
        for i, tensor in enumerate(parts):
            part = name if isinstance(value, torch.Tensor) else f"{name}[{i}]"
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedLayout(f"KV cache {part!r} is a {type(tensor).__name__}, not a tensor")
            if tensor.layout != torch.strided:
                raise UnsupportedLayout(f"KV cache {part!r} has the layout {tensor.layout}, not torch.strided")
            if tensor.numel() == 0:
                continue
            size = tensor.element_size()
            dims = tuple((n, s * size) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            yield _Tensor(part, tensor, dims)


def _block_dims(t: _Tensor, num_blocks: int, hint: int | Mapping[str, int] | None) -> list[int]:
    possible = [d for d, (size, _) in enumerate(t.dims) if size % num_blocks == 0]
    known = hint.get(t.name.split("[")[0]) if isinstance(hint, Mapping) else hint
    if known is not None:
        if known not in possible:
            raise UnsupportedLayout(f"KV cache {t}: dimension {known} does not count {num_blocks} blocks")
        return [known]
    if not possible:
        raise UnsupportedLayout(f"KV cache {t} has no dimension of {num_blocks} blocks, nor of a multiple")
    return possible


def _split(t: _Tensor, block_dim: int, num_blocks: int) -> list[Region]:
    """Regions of one tensor whose blocks are counted by ``block_dim``."""
    size, stride = t.dims[block_dim]
    kernel_blocks = size // num_blocks
    block_stride = stride * kernel_blocks
    rest = [d for i, d in enumerate(t.dims) if i != block_dim] + [(kernel_blocks, stride)]
    rest = sorted(((n, s) for n, s in rest if n > 1), key=lambda d: d[1])
    block_bytes = t.tensor.element_size()
    # Grow the dense piece from the innermost dimension outwards, up to the next block at most.
    while rest and rest[0][1] == block_bytes and block_bytes * rest[0][0] <= block_stride:
        block_bytes *= rest.pop(0)[0]
    pieces = math.prod(n for n, _ in rest)
    if pieces > MAX_PIECES_PER_TENSOR:
        raise UnsupportedLayout(f"KV cache {t}: a block lies in {pieces} pieces of {block_bytes} bytes")
    regions = [
        Region(
            names=(t.name,),
            device=t.tensor.device,
            address=t.tensor.data_ptr() + sum(i * s for i, (_, s) in zip(index, rest, strict=True)),
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            block_stride=block_stride,
            tensors=(t.tensor,),
        )
        for index in itertools.product(*(range(n) for n, _ in rest))
    ]
    ordered = sorted(regions, key=lambda r: r.address)
    if block_bytes > block_stride or any(a.address == b.address for a, b in itertools.pairwise(ordered)):
        raise UnsupportedLayout(f"KV cache {t}: its elements overlap (an expanded view?)")
    return regions


def _extent(region: Region) -> tuple[int, int, int]:
    return region.address, region.block_bytes, region.block_stride


def _spans_meet(a: Region, b: Region) -> bool:
    return a.address < b.end and b.address < a.end


def _compatible(a: Region, b: Region) -> bool:
    """Whether no byte of two regions over the same memory belongs to different blocks."""
    if a.block_stride != b.block_stride:
        return False
    low, high = (a, b) if a.address <= b.address else (b, a)
    gap = high.address - low.address
    if gap + high.block_bytes <= low.block_stride:
        return True  # side by side, or overlapping, inside the same block
    # High starts later than one block of low can hold: they may only interleave.
    phase = gap % low.block_stride
    return phase >= low.block_bytes and phase + high.block_bytes <= low.block_stride


def _merge(regions: list[Region]) -> list[Region]:
    """Join regions that overlap or touch inside every block, and refuse those that contradict each other."""
    merged: list[Region] = []
    by_stride: defaultdict[int, list[Region]] = defaultdict(list)
    for region in regions:
        by_stride[region.block_stride].append(region)
    for stride, group in by_stride.items():
        current: Region | None = None
        for region in sorted(group, key=lambda r: (r.address, -r.block_bytes)):
            if current is None:
                current = region
                continue
            end = max(current.address + current.block_bytes, region.address + region.block_bytes)
            touches = region.address <= current.address + current.block_bytes
            if touches and end - current.address <= stride:
                current = replace(
                    current,
                    block_bytes=end - current.address,
                    names=tuple(dict.fromkeys(current.names + region.names)),
                    tensors=current.tensors + region.tensors,
                )
            else:
                merged.append(current)
                current = region
        assert current is not None
        merged.append(current)
    merged.sort(key=lambda r: (r.address, r.block_stride))
    # Sorted by address, only regions that start before the furthest end so far can meet.
    open_regions: list[Region] = []
    for region in merged:
        open_regions = [o for o in open_regions if o.end > region.address]
        for other in open_regions:
            if not _compatible(other, region):
                raise UnsupportedLayout(
                    f"KV caches {other.name} and {region.name} share memory at {region.address:#x} under different "
                    f"block ids (block strides {other.block_stride} and {region.block_stride} bytes)"
                )
        open_regions.append(region)
    return merged
