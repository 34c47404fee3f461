"""Linear layers that give a token the same result whatever else is in the batch.

The kernels that vLLM picks on a CPU add up in another order for another number of tokens, and which numbers differ
depends on the processor. Float32 leaves the choice of a token far above that noise. Bfloat16 does not: among 2,400
tokens of a random model some have two logits that are equal to the bit, and a preemption changes the batch even where
all KV comes back as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install() -> None:
    """Have every model loaded from now on in this process multiply row by row; safe to call more than once."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if getattr(dispatch, "row_by_row", False):
        return

    def dispatch_row_by_row(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2 or layer.weight.is_meta:
            dispatch(layer, remove_weight)
        else:
            layer.cpu_linear = _RowByRow(layer.weight)

    dispatch_row_by_row.row_by_row = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_row_by_row


class _RowByRow:
    """`torch.nn.functional.linear` for one weight, one matrix-vector product per token, added up in float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.detach().float()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        import torch

        rows = x.reshape(-1, x.shape[-1]).float()
        product = torch.stack([torch.mv(self._weight, row) for row in rows])
        if bias is not None:
            product += bias.float()
        return product.to(x.dtype).reshape(*x.shape[:-1], -1)
