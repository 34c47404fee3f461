"""The vLLM plugin: makes `"kv_connector": "RecomputeCPUOffloadConnector"` known by its short name."""

from offload_connector._vllm import KVConnectorFactory, init_logger

logger = init_logger("vllm.offload_connector")

NAME = "RecomputeCPUOffloadConnector"


def register() -> None:
    """Entry point `vllm.general_plugins`; vLLM calls it in every process, possibly more than once."""
    if NAME in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(NAME, "offload_connector", NAME)
