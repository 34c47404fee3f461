"""The Prefill server of the benchmark's prefill/decode cells, and what asks it."""

from __future__ import annotations

import contextlib
import json
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_integration.bench.cells import BLOCK_TOKENS, MAX_NUM_SEQS, Cell
from pd_integration.deployment import MODEL_NAME, mooncake
from pd_integration.proxy import bodies
from pd_integration.servers import HOST, free_ports, vllm_server

TIMEOUT_S = 120.0
BUDGET = 2048


@dataclass(frozen=True)
class PrefillClient:
    """Asks a Prefill server, from any thread and any process."""

    url: str
    bootstrap: str
    engine_id: str

    def compute(self, token_ids: list[int], keep: bool = True) -> dict[str, Any]:
        """Have the KV of ``token_ids`` computed; returns the kv_transfer_params with which Decode pulls it.

        With ``keep`` off nobody will: it only goes into Prefill's prefix cache.
        """
        transfer_id = uuid.uuid4().hex
        body = bodies.for_prefill({"model": MODEL_NAME, "prompt": token_ids}, chat=False)
        if keep:
            body["kv_transfer_params"] = bodies.kept_params(transfer_id)
        _json(f"{self.url}/v1/completions", body)
        return bodies.transfer_params(transfer_id, self.bootstrap, self.engine_id)


@contextlib.contextmanager
def prefill_server(model: Path, cells: list[Cell], log: Path) -> Iterator[PrefillClient]:
    """Start Prefill, with all prompts of ``cells`` in its prefix cache, and stop it when the block ends.

    The cache keeps the cost of Prefill out of a measurement of Decode on the same cores; to send a request to Prefill
    again costs the least it can.
    """
    bootstrap_port = free_ports(1)[0]
    tokens = sum(prompt + output for cell in cells for prompt, output in cell.lengths())
    arguments = [
        *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init"),
        *("--max-model-len", str(max(cell.longest for cell in cells))),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(BUDGET)),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(2 * tokens // BLOCK_TOKENS)),
        *("--enable-prefix-caching", "--distributed-executor-backend", "uni"),
        *("--kv-transfer-config", json.dumps(mooncake("kv_producer"))),
        "--disable-uvicorn-access-log",
    ]
    environment = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port)}
    with vllm_server("prefill", model, log, arguments, environment) as server:
        server.wait_healthy()
        bootstrap = f"http://{HOST}:{bootstrap_port}"
        client = PrefillClient(server.url, bootstrap, _json(f"{bootstrap}/query")["0"]["engine_id"])
        for cell in cells:
            for prompt in cell.prompts():
                client.compute(prompt, keep=False)
        yield client


def _json(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)
