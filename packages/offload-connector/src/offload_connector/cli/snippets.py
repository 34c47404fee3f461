"""The JSON to paste into vLLM's command line."""

from __future__ import annotations

from typing import Any

from offload_connector.cli.budget import Deployment
from offload_connector.cli.names import CHILDREN, CONNECTOR, FLAG, MULTI
from offload_connector.config import PER_RANK, ROLE


def offload_entry(per_rank: int) -> dict[str, Any]:
    """The connector's own entry, in a multi connector or alone."""
    return {"kv_connector": CONNECTOR, "kv_role": ROLE, "kv_connector_extra_config": {PER_RANK: per_rank}}


def kv_transfer_config(
    per_rank: int, deployment: Deployment, pd_connector: str, prefill_tp: int, prefill_dp: int
) -> dict[str, Any]:
    """`--kv-transfer-config` of a Decode node: the connector that brings KV from Prefill, and this one."""
    prefill = {"dp_size": prefill_dp, "tp_size": prefill_tp}
    decode = {"dp_size": deployment.dp, "tp_size": deployment.tp}
    transfer = {
        "kv_connector": pd_connector,
        "kv_role": ROLE,
        "kv_port": "28000",
        "kv_connector_extra_config": {"prefill": prefill, "decode": decode},
    }
    return {
        "kv_connector": MULTI,
        "kv_role": ROLE,
        "kv_connector_extra_config": {CHILDREN: [transfer, offload_entry(per_rank)]},
    }


def additional_config() -> dict[str, Any]:
    """`--additional-config` of a Decode node."""
    return {FLAG: True}
