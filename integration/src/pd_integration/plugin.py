"""vLLM plugin of the test harness (entry point ``vllm.general_plugins``).

vLLM calls `register` in the API server, the engine core and every worker. It makes `mooncake_cpu.MooncakeConnectorCPU`
known by name: MultiConnector looks the class of a child's statistics up by its name, and with one it can't find the API
server ends at the first failed transfer. Without the environment variables below it changes nothing else.

- ``PD_INTEGRATION_ASYNC_SCHEDULING=1``: keep async scheduling on, on the CPU platform. It is vLLM's default on
  accelerators; its CPU platform turns it off whatever is asked for, because it brings a CPU no speed. We want the
  scheduling that users run.
- ``PD_INTEGRATION_STEP_TRACE=PATH``: write what the scheduler does in each step to PATH, see `step_trace`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ASYNC_SCHEDULING = "PD_INTEGRATION_ASYNC_SCHEDULING"
STEP_TRACE = "PD_INTEGRATION_STEP_TRACE"
CPU_CONNECTOR = "MooncakeConnectorCPU"


def register() -> None:
    """Name the connector and install what the environment asks for; safe to call more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CPU_CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CPU_CONNECTOR, "pd_integration.mooncake_cpu", CPU_CONNECTOR)
    if os.environ.get(ASYNC_SCHEDULING) == "1":
        keep_async_scheduling()
    if path := os.environ.get(STEP_TRACE):
        from pd_integration.step_trace import install

        install(path)


def keep_async_scheduling() -> None:
    """Make the CPU platform leave ``async_scheduling`` on, as every other platform of vLLM does."""
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.__dict__["check_and_update_config"].__func__
    if getattr(check, "keeps_async_scheduling", False):
        return

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        if not streams_can_wait():
            vllm_config.parallel_config.worker_cls = "pd_integration.async_worker.AsyncCPUWorker"

    check_and_update_config.keeps_async_scheduling = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore


def streams_can_wait() -> bool:
    """Whether the CPU model runner's stand-in for a stream has all that async scheduling calls; vLLM 0.23's has not."""
    spec = importlib.util.find_spec("vllm.v1.worker.cpu_model_runner")
    return spec is not None and spec.origin is not None and "wait_stream" in Path(spec.origin).read_text("utf-8")
