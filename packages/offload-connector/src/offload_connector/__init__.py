"""RecomputeCPUOffloadConnector: a preempted Decode request keeps its KV cache in host memory.

`"kv_connector_module_path": "offload_connector"` in kv-transfer-config loads the connector from here.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_connector.connector import RecomputeCPUOffloadConnector

__version__ = "0.1.0"
__all__ = ["RecomputeCPUOffloadConnector"]


def __getattr__(name: str) -> Any:
    # The connector needs vLLM and torch; the command line and the configuration rules do without them.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from offload_connector import _vllm  # noqa: F401 - first, for its error that names the versions that work
    from offload_connector.connector import RecomputeCPUOffloadConnector

    return RecomputeCPUOffloadConnector
