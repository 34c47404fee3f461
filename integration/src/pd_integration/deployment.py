"""Command lines of a prefill/decode deployment on loopback, and the arms that the demo compares."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pd_integration.plugin import ASYNC_SCHEDULING, STEP_TRACE
from pd_integration.servers import HOST, Server, free_ports, vllm_server

MODEL_NAME = "tiny"
BLOCK_TOKENS = 32  # a multiple of 32, or vLLM's CPU attention is slow


@dataclass(frozen=True)
class Sizes:
    """How large the servers are; blocks are of `BLOCK_TOKENS` tokens."""

    max_model_len: int = 2048
    max_num_seqs: int = 16
    ample_blocks: int = 1200
    """KV cache of the plain server and of Prefill: never full."""
    decode_blocks: int = 260
    """Decode's KV cache: about half of what its running requests come to need."""
    decode_budget: int = 16
    """Decode's max_num_batched_tokens: max_num_seqs, no speculative tokens."""
    host_bytes: int = 80 << 20
    """cpu_bytes_to_use_per_rank of the connector: room for every running request at its longest."""


@dataclass(frozen=True)
class Arm:
    """One way to run Decode; a number left None is taken from `Sizes`."""

    name: str
    connector: bool
    async_scheduling: bool
    decode_blocks: int | None = None
    host_bytes: int | None = None


OFF = Arm("vLLM's own recompute", connector=False, async_scheduling=True)
ON = Arm("connector", connector=True, async_scheduling=True)
ON_SYNC = Arm("connector, async scheduling off", connector=True, async_scheduling=False)
NO_PRESSURE = Arm("no pressure", connector=False, async_scheduling=True, decode_blocks=Sizes.ample_blocks)
"""What Mooncake and the proxy do on their own: a fault of theirs shows up here first."""
SMALL_POOL = Arm("connector, small host pool", connector=True, async_scheduling=True, host_bytes=3 << 20)
"""24 host blocks: some victims find no room and are recomputed."""


def mooncake(role: str) -> dict:
    """The Mooncake connector's transfer config for a host without an accelerator."""
    return {
        "kv_connector": "MooncakeConnectorCPU",
        "kv_connector_module_path": "pd_integration.mooncake_cpu",
        "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }


def offload(host_bytes: int, **extra: object) -> dict:
    """The offload connector's transfer config; ``extra`` are further keys of its own."""
    return {
        "kv_connector": "RecomputeCPUOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": host_bytes, **extra},
    }


def together(*children: dict) -> dict:
    """The transfer config of a Decode with several connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def decode_transfer(arm: Arm, sizes: Sizes, alone: bool = False) -> dict:
    """Decode's transfer config: Mooncake, with the offload connector beside it, or that one ``alone``."""
    if not arm.connector:
        return mooncake("kv_consumer")
    ours = offload(sizes.host_bytes if arm.host_bytes is None else arm.host_bytes)
    return ours if alone else together(mooncake("kv_consumer"), ours)


def _common(sizes: Sizes) -> list[str]:
    return [
        *("--served-model-name", MODEL_NAME),
        *("--dtype", "float32"),
        *("--max-model-len", str(sizes.max_model_len)),
        *("--max-num-seqs", str(sizes.max_num_seqs)),
        *("--block-size", str(BLOCK_TOKENS)),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",  # or the last log lines of a server that died would be its health checks
        # The engine core runs the model itself: one process less that waits busily.
        *("--distributed-executor-backend", "uni"),
    ]


def plain_server(model: Path, run_dir: Path, sizes: Sizes) -> Server:
    """One vLLM server that does everything, with a KV cache that is never full: what the outputs must be."""
    arguments = [*_common(sizes), "--num-gpu-blocks-override", str(sizes.ample_blocks)]
    return vllm_server("plain", model, run_dir / "plain.log", arguments)


def prefill_server(model: Path, run_dir: Path, sizes: Sizes, bootstrap_port: int) -> Server:
    """The Prefill server; Decode asks its bootstrap port where the KV is."""
    arguments = [
        *_common(sizes),
        *("--num-gpu-blocks-override", str(sizes.ample_blocks)),
        *("--kv-transfer-config", json.dumps(mooncake("kv_producer"))),
    ]
    environment = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port)}
    return vllm_server("prefill", model, run_dir / "prefill.log", arguments, environment)


def decode_server(model: Path, run_dir: Path, sizes: Sizes, arm: Arm, alone: bool = False) -> Server:
    """The Decode server of ``arm``, ``alone`` without Mooncake; its scheduler's steps go to ``run_dir/trace.jsonl``."""
    blocks = sizes.decode_blocks if arm.decode_blocks is None else arm.decode_blocks
    arguments = [
        *_common(sizes),
        *("--num-gpu-blocks-override", str(blocks)),
        *("--max-num-batched-tokens", str(sizes.decode_budget)),
        *("--kv-transfer-config", json.dumps(decode_transfer(arm, sizes, alone))),
    ]
    if arm.connector:
        arguments += ["--additional-config", json.dumps({"recompute_scheduler_enable": True})]
    environment = {STEP_TRACE: str(run_dir / "trace.jsonl")}
    if arm.async_scheduling:
        environment[ASYNC_SCHEDULING] = "1"
    return vllm_server("decode", model, run_dir / "decode.log", arguments, environment)


def proxy_server(prefill: Server, bootstrap_port: int, decode: Server, run_dir: Path) -> Server:
    """The proxy in front of one Prefill and one Decode server."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "pd_integration.proxy", "--prefill", prefill.url]
    command += ["--prefill-bootstrap", f"http://{HOST}:{bootstrap_port}", "--decode", decode.url]
    command += ["--host", HOST, "--port", str(port)]
    return Server("proxy", command, port, run_dir / "proxy.log")


@dataclass(frozen=True)
class Deployment:
    """A running Prefill server, to which Decode servers are joined one after the other."""

    model: Path
    sizes: Sizes
    prefill: Server
    bootstrap_port: int

    @contextlib.contextmanager
    def decode(self, arm: Arm, run_dir: Path) -> Iterator[Pair]:
        """Start Decode as ``arm`` says, with a proxy in front; both are stopped when the block ends."""
        with decode_server(self.model, run_dir, self.sizes, arm) as decode:
            decode.wait_healthy()
            with proxy_server(self.prefill, self.bootstrap_port, decode, run_dir) as proxy:
                proxy.wait_healthy()
                yield Pair(self.prefill, decode, proxy, run_dir / "trace.jsonl")


@dataclass(frozen=True)
class Pair:
    """A whole deployment that answers on ``proxy.url``."""

    prefill: Server
    decode: Server
    proxy: Server
    trace: Path

    def check(self) -> None:
        """Raise ServerError if one of the three has died."""
        for server in (self.decode, self.prefill, self.proxy):
            server.check_alive()


@contextlib.contextmanager
def deployment(model: Path, run_dir: Path, sizes: Sizes) -> Iterator[Deployment]:
    """Start the Prefill server (wait for its health yourself) and stop it when the block ends."""
    bootstrap_port = free_ports(1)[0]
    with prefill_server(model, run_dir, sizes, bootstrap_port) as prefill:
        yield Deployment(model, sizes, prefill, bootstrap_port)
