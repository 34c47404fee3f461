"""Linear layers of the families in bfloat16."""

import subprocess
import sys

import pytest
import torch
from vllm.model_executor.layers import utils

from pd_integration.families import batch_invariant


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    batch_invariant.install()
    batch_invariant.install()
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 256, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer


def test_a_token_gets_the_same_result_in_any_batch(layer):
    tokens = torch.randn(16, 512, dtype=torch.bfloat16)
    together = layer.cpu_linear(tokens, layer.weight, layer.bias)
    for first in range(16):
        for last in range(first + 1, 17):
            part = layer.cpu_linear(tokens[first:last], layer.weight, layer.bias)
            assert torch.equal(part, together[first:last])


def test_the_result_is_that_of_a_linear_layer(layer):
    tokens = torch.randn(2, 3, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = torch.nn.functional.linear(tokens.double(), layer.weight.double(), layer.bias.double())
        given = layer.cpu_linear(tokens, layer.weight, layer.bias)
    assert given.dtype == torch.bfloat16
    torch.testing.assert_close(given.double(), exact, rtol=2**-8, atol=0.0)


def test_weights_that_are_no_matrix_are_left_to_vllm(layer):
    convolution = torch.nn.Conv1d(8, 8, 4, groups=8)
    utils.dispatch_cpu_unquantized_gemm(convolution, remove_weight=False)
    assert not hasattr(convolution, "cpu_linear")


def test_torch_is_loaded_after_the_environment_is_prepared():
    """torch settles how many threads it computes with when it is loaded."""
    code = "import sys, pd_integration.families.run; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
