"""The command lines: what Decode is told is what the documentation tells users."""

import json
from pathlib import Path

import pytest

from pd_integration.deployment import (
    NO_PRESSURE,
    OFF,
    ON,
    ON_SYNC,
    SMALL_POOL,
    Arm,
    Sizes,
    decode_server,
    prefill_server,
)
from pd_integration.plugin import ASYNC_SCHEDULING, STEP_TRACE
from pd_integration.servers import HOST, Server

MOONCAKE = {
    "kv_connector": "MooncakeConnectorCPU",
    "kv_connector_module_path": "pd_integration.mooncake_cpu",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}


def decode(arm: Arm, tmp_path: Path) -> Server:
    return decode_server(Path("model"), tmp_path, Sizes(), arm)


def option(server: Server, name: str) -> str:
    return server.command[server.command.index(name) + 1]


def test_decode_runs_the_multi_connector_with_the_offload_connector(tmp_path: Path) -> None:
    server = decode(ON, tmp_path)
    assert json.loads(option(server, "--additional-config")) == {"recompute_scheduler_enable": True}
    offload = {
        "kv_connector": "RecomputeCPUOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": Sizes().host_bytes},
    }
    assert json.loads(option(server, "--kv-transfer-config")) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [{**MOONCAKE, "kv_role": "kv_consumer"}, offload]},
    }


def test_decode_without_the_connector_differs_in_nothing_else(tmp_path: Path) -> None:
    off, on = decode(OFF, tmp_path), decode(ON, tmp_path)
    assert json.loads(option(off, "--kv-transfer-config")) == {**MOONCAKE, "kv_role": "kv_consumer"}
    on.command[on.command.index("--kv-transfer-config") + 1] = option(off, "--kv-transfer-config")
    on.command[on.command.index("--port") + 1] = option(off, "--port")
    at = on.command.index("--additional-config")
    del on.command[at : at + 2]
    assert on.command == off.command
    assert on.environment == off.environment


def test_prefill_is_a_producer_with_its_own_bootstrap_port(tmp_path: Path) -> None:
    server = prefill_server(Path("model"), tmp_path, Sizes(), 4321)
    assert json.loads(option(server, "--kv-transfer-config")) == {**MOONCAKE, "kv_role": "kv_producer"}
    assert server.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "4321"


@pytest.mark.parametrize("arm", [OFF, ON, ON_SYNC])
def test_async_scheduling_and_trace_are_asked_for_by_environment(arm: Arm, tmp_path: Path) -> None:
    server = decode(arm, tmp_path)
    assert server.environment.get(ASYNC_SCHEDULING) == ("1" if arm.async_scheduling else None)
    assert server.environment[STEP_TRACE] == str(tmp_path / "trace.jsonl")


def test_arms_override_sizes(tmp_path: Path) -> None:
    assert option(decode(NO_PRESSURE, tmp_path), "--num-gpu-blocks-override") == str(Sizes().ample_blocks)
    assert option(decode(ON, tmp_path), "--num-gpu-blocks-override") == str(Sizes().decode_blocks)
    config = json.loads(option(decode(SMALL_POOL, tmp_path), "--kv-transfer-config"))
    offload = config["kv_connector_extra_config"]["connectors"][1]
    assert offload["kv_connector_extra_config"] == {"cpu_bytes_to_use_per_rank": SMALL_POOL.host_bytes}


def test_servers_listen_on_loopback_alone(tmp_path: Path) -> None:
    server = decode(ON, tmp_path)
    assert option(server, "--host") == HOST == "127.0.0.1"
    assert server.environment["VLLM_HOST_IP"] == HOST
