"""Shapes that do not tell which dimension counts the blocks; vLLM's own allocation does."""

import pytest
import torch

from npu_copy import find_regions
from offload_connector.block_dims import block_dims

BLOCKS = 64


def test_a_dimension_that_happens_to_be_as_large_is_not_taken():
    cache = {"layer": torch.zeros(BLOCKS, 4, 32, BLOCKS)}
    page = 4 * 32 * BLOCKS * 4
    assert block_dims(cache, BLOCKS, {"layer": page}) == {"layer": 0}
    (region,) = find_regions(cache, BLOCKS, block_dim={"layer": 0})
    assert region.block_bytes == page


def test_k_and_v_ahead_of_the_blocks():
    cache = {"layer": torch.zeros(2, BLOCKS, BLOCKS, 8)}
    page = 2 * BLOCKS * 8 * 4
    assert block_dims(cache, BLOCKS, {"layer": page}) == {"layer": 1}
    assert len(find_regions(cache, BLOCKS, block_dim={"layer": 1})) == 2


@pytest.mark.parametrize("shape", [(BLOCKS, 4, 8), (2, BLOCKS, 4)])
def test_plain_shapes_need_no_help(shape):
    assert block_dims({"layer": torch.zeros(shape)}, BLOCKS, {"layer": 1}) == {}


def test_without_a_fitting_stride_nothing_is_claimed():
    cache = {"layer": torch.zeros(BLOCKS, BLOCKS)}
    assert block_dims(cache, BLOCKS, {"layer": 3}) == {}
    assert block_dims(cache, BLOCKS, {}) == {}
    assert block_dims({"layer": [torch.zeros(BLOCKS, BLOCKS)]}, BLOCKS, {"layer": 256}) == {}
