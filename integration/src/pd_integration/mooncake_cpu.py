"""vLLM's MooncakeConnector on a host without an accelerator.

What it replaces, and why. The worker half of `MooncakeConnector` (vLLM 0.32) asks
`torch.accelerator.current_device_index()` for the device whose memory it will register, and binds its sender threads to
that device. On a CPU build of PyTorch that call raises, although the rest of the connector is at home there: with
`mooncake_protocol: tcp` the engine registers plain host memory, and the CPU platform's `set_device` does nothing.
So, on the CPU platform only, this module makes `torch.accelerator.current_device_index` answer 0 and
`torch.accelerator.synchronize` return at once (CPU work is done when the call returns). Nothing else is touched: the
bootstrap server, the side channel, the planning of transfers and the Mooncake engine are vLLM's and Mooncake's own.

Use it by name: `{"kv_connector": "MooncakeConnectorCPU", "kv_connector_module_path": "pd_integration.mooncake_cpu"}`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.platforms import current_platform


def _no_device_index() -> int:
    return 0


def _nothing_to_wait_for(device: Any = None) -> None:
    return None


if current_platform.is_cpu():
    torch.accelerator.current_device_index = _no_device_index
    torch.accelerator.synchronize = _nothing_to_wait_for


class MooncakeConnectorCPU(MooncakeConnector):
    """`MooncakeConnector`, loaded through this module so that the replacements above are in place first."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Hand vLLM 0.23 each layer as a list of one: it takes a bare tensor apart along its first dimension.

        That is meant for layouts with K and V apart; the CPU backend's has both in one block.
        """
        topology = getattr(self.connector_worker, "transfer_topo", None)
        apart = getattr(topology, "split_k_and_v", False)
        super().register_kv_caches({name: [cache] for name, cache in kv_caches.items()} if apart else kv_caches)
