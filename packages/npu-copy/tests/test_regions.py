from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_copy import Region, UnsupportedLayout, find_regions
from npu_copy.regions import KVCache

N = 11  # divides no other dimension used here


def block_addresses(tensor: torch.Tensor, block_dim: int, num_blocks: int, block: int) -> set[int]:
    """Addresses of every byte of one scheduler block, element by element."""
    scale = tensor.shape[block_dim] // num_blocks
    sizes = list(tensor.shape)
    sizes[block_dim] = scale
    size, start = (
        tensor.element_size(),
        tensor.data_ptr() + block * scale * tensor.stride(block_dim) * tensor.element_size(),
    )
    addresses = set()
    for index in itertools.product(*map(range, sizes)):
        first = start + size * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        addresses |= set(range(first, first + size))
    return addresses


def region_addresses(regions: list[Region], block: int) -> list[int]:
    starts = [(r.address + block * r.block_stride, r.block_bytes) for r in regions]
    return [a for start, size in starts for a in range(start, start + size)]


def assert_covers(regions: list[Region], kv: dict[str, KVCache], block_dims: dict[str, int]) -> None:
    for block in range(N):
        wanted: set[int] = set()
        for name, value in kv.items():
            for tensor in [value] if isinstance(value, torch.Tensor) else value:
                wanted |= block_addresses(tensor, block_dims[name], N, block)
        covered = region_addresses(regions, block)
        assert len(covered) == len(set(covered)), "a byte is copied twice"
        assert set(covered) == wanted


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_blocks_first_is_one_dense_region() -> None:
    kv = {"a": bf16(N, 4, 2, 8)}
    (region,) = find_regions(kv, N)
    assert (region.address, region.num_blocks) == (kv["a"].data_ptr(), N)
    assert (region.block_bytes, region.block_stride) == (128, 128)
    assert region.names == ("a",)


def test_keys_and_values_ahead_of_the_blocks_are_two_regions() -> None:
    kv = {"a": bf16(2, N, 4, 8)}
    regions = find_regions(kv, N)
    assert [(r.block_bytes, r.block_stride) for r in regions] == [(64, 64)] * 2
    assert_covers(regions, kv, {"a": 1})


def test_keys_and_values_inside_each_block_are_one_region() -> None:
    kv = {"a": bf16(N, 2, 4, 8).permute(1, 0, 2, 3)}
    regions = find_regions(kv, N)
    assert [r.block_bytes for r in regions] == [128]
    assert_covers(regions, kv, {"a": 1})


def test_heads_outside_the_blocks_are_one_region_each() -> None:
    kv = {"a": bf16(3, N, 4, 8).permute(1, 0, 2, 3)}
    regions = find_regions(kv, N)
    assert [r.block_bytes for r in regions] == [64] * 3
    assert_covers(regions, kv, {"a": 0})


def test_a_tuple_of_keys_and_values_and_a_tensor_of_scales() -> None:
    kv = {"a": (torch.zeros(N, 4, 8, dtype=torch.int8), torch.zeros(N, 4, 8, dtype=torch.int8), torch.zeros(N, 4))}
    regions = find_regions(kv, N)
    assert sorted(r.block_bytes for r in regions) == [16, 32, 32]
    assert {r.name for r in regions} == {"a[0]", "a[1]", "a[2]"}
    assert_covers(regions, kv, {"a": 0})


def test_all_layers_in_one_block_are_one_region() -> None:
    storage = bf16(N, 5, 4, 8)
    kv = {f"layer.{i}": storage[:, i] for i in range(5)}
    (region,) = find_regions(kv, N)
    assert (region.block_bytes, region.block_stride) == (320, 320)
    assert len(region.names) == len(region.tensors) == 5
    assert region.name == "layer.0..layer.4 (5 tensors)"
    assert_covers([region], kv, dict.fromkeys(kv, 0))


def test_layers_one_after_the_other_in_one_allocation_stay_apart() -> None:
    storage = bf16(5, N, 4, 8)
    kv = {f"layer.{i}": storage[i] for i in range(5)}
    regions = find_regions(kv, N)
    assert [r.block_bytes for r in regions] == [64] * 5
    assert_covers(regions, kv, dict.fromkeys(kv, 0))


def test_layers_of_different_groups_over_one_memory_are_copied_once() -> None:
    storage = bf16(2, N, 4, 8)
    kv = {"full.0": storage[0], "sliding.0": storage[0], "full.1": storage[1], "sliding.1": storage[1].view(N, 8, 4)}
    regions = find_regions(kv, N)
    assert [r.names for r in regions] == [("full.0", "sliding.0"), ("full.1", "sliding.1")]
    assert_covers(regions, kv, dict.fromkeys(kv, 0))


def test_state_tensors_in_a_padded_page_over_an_attention_layer() -> None:
    pages = torch.zeros(N * 256, dtype=torch.int8)
    convolution = pages.as_strided((N, 3, 8), (256, 8, 1))
    recurrent = pages[24:].view(torch.int8).as_strided((N, 100), (256, 1))
    attention = pages.view(torch.bfloat16).as_strided((2, N, 8, 8), (64, 128, 8, 1))
    (mamba,) = find_regions({"mamba": [convolution, recurrent]}, N)
    assert (mamba.block_bytes, mamba.block_stride) == (124, 256)
    (both,) = find_regions({"mamba": [convolution, recurrent], "attention": attention}, N)
    assert (both.block_bytes, both.names) == (256, ("attention", "mamba[0]", "mamba[1]"))


def test_kernel_blocks_smaller_than_the_schedulers() -> None:
    kv = {"a": (bf16(N * 4, 4, 8), bf16(N * 4, 4, 8))}
    regions = find_regions(kv, N)
    assert [(r.block_bytes, r.block_stride) for r in regions] == [(256, 256)] * 2
    assert_covers(regions, kv, {"a": 0})


def test_padded_kernel_blocks_are_one_region_each() -> None:
    kv = {"a": bf16(N * 2, 40)[:, :32]}
    regions = find_regions(kv, N)
    assert [(r.block_bytes, r.block_stride) for r in regions] == [(64, 160)] * 2
    assert_covers(regions, kv, {"a": 0})


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    scale=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
    block_dim=st.integers(0, 3),
    gap=st.integers(0, 3),
)
def test_every_byte_of_a_block_once_whatever_the_layout(sizes, scale, order, block_dim, gap) -> None:
    block_dim = min(block_dim, len(sizes))
    shape = sizes[:block_dim] + [N * scale] + sizes[block_dim:]
    memory_order = list(range(len(shape)))
    order.shuffle(memory_order)
    strides, stride = [0] * len(shape), 1
    for dim in reversed(memory_order):
        strides[dim] = stride
        stride = stride * shape[dim] + gap * order.randint(0, 1)
    tensor = torch.zeros(stride + 8, dtype=torch.int16).as_strided(shape, strides)
    regions = find_regions({"a": tensor}, N, block_dim=block_dim)
    assert_covers(regions, {"a": tensor}, {"a": block_dim})


def test_regions_keep_the_memory_alive_and_view_it() -> None:
    kv = {"a": torch.arange(N * 8, dtype=torch.uint8).view(N, 8)[:, 2:6]}
    (region,) = find_regions(kv, N)
    del kv
    assert region.block_view()[3].tolist() == [26, 27, 28, 29]


class TestRefused:
    def test_no_dimension_of_blocks(self) -> None:
        with pytest.raises(UnsupportedLayout, match=r"'layer\.7' \(shape \(7, 4\).*no dimension of 11 blocks"):
            find_regions({"layer.7": bf16(7, 4)}, N)

    def test_two_dimensions_that_could_count_blocks(self) -> None:
        with pytest.raises(UnsupportedLayout, match=r"'a' \(shape \(11, 22, 4\).*more than one dimension.*block_dim"):
            find_regions({"a": bf16(N, 2 * N, 4)}, N)

    def test_a_hint_that_does_not_fit(self) -> None:
        with pytest.raises(UnsupportedLayout, match=r"dimension 1 does not count 11 blocks"):
            find_regions({"a": bf16(N, 4)}, N, block_dim={"a": 1})

    def test_views_that_shift_blocks_against_each_other(self) -> None:
        storage = bf16((N + 1) * 8)
        kv = {"a": storage[: N * 8].view(N, 8), "b": storage[8:].view(N, 8)}
        with pytest.raises(UnsupportedLayout, match=r"a and b share memory .* different block ids"):
            find_regions(kv, N)

    def test_views_with_other_block_sizes_over_one_memory(self) -> None:
        storage = bf16(N * 8)
        with pytest.raises(UnsupportedLayout, match=r"block strides \d+ and \d+ bytes"):
            find_regions({"a": storage.view(N, 8), "b": storage[: N * 4].view(N, 4)}, N)

    def test_an_expanded_tensor(self) -> None:
        with pytest.raises(UnsupportedLayout, match="overlap"):
            find_regions({"a": bf16(1, 8).expand(N, 8)}, N)
        with pytest.raises(UnsupportedLayout, match="overlap"):
            find_regions({"a": bf16(N, 1, 8).expand(N, 3, 8)}, N)

    def test_what_is_no_tensor(self) -> None:
        with pytest.raises(UnsupportedLayout, match=r"'a\[1\]' is a NoneType"):
            find_regions({"a": (bf16(N, 4), None)}, N)  # type: ignore[arg-type]

    def test_a_sparse_tensor(self) -> None:
        with pytest.raises(UnsupportedLayout, match=r"layout torch\.sparse_coo"):
            find_regions({"a": bf16(N, 4).to_sparse()}, N)

    @pytest.mark.parametrize("num_blocks", [-1, 0, 1])
    def test_fewer_than_two_blocks(self, num_blocks: int) -> None:
        with pytest.raises(ValueError, match=f"at least 2.*got {num_blocks}"):
            find_regions({"a": bf16(N, 4)}, num_blocks)

    def test_nothing_registered(self) -> None:
        with pytest.raises(ValueError, match="no tensor"):
            find_regions({"a": bf16(0, 4)}, N)

    def test_several_devices(self) -> None:
        with pytest.raises(UnsupportedLayout, match=r"\['cpu', 'meta'\]"):
            find_regions({"a": bf16(N, 4), "b": torch.zeros(N, 4, device="meta")}, N)


def test_a_hint_settles_which_dimension_counts_blocks() -> None:
    kv = {"a": bf16(N, 2 * N, 4)}
    assert [r.block_bytes for r in find_regions(kv, N, block_dim={"a": 0})] == [176]
    assert [r.block_bytes for r in find_regions(kv, N, block_dim=1)] == [16] * N


def test_another_tensor_over_the_same_memory_settles_it_too() -> None:
    storage = bf16(N, N, 4)
    regions = find_regions({"a": storage, "b": storage.view(N, 4 * N)[:, :4]}, N)
    assert [(r.block_bytes, r.names) for r in regions] == [(8 * N, ("a", "b"))]
