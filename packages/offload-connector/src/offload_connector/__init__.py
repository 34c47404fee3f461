"""RecomputeCPUOffloadConnector: a preempted Decode request keeps its KV cache in host memory.

`"kv_connector_module_path": "offload_connector"` in kv-transfer-config loads the connector from here.
"""

from offload_connector.connector import RecomputeCPUOffloadConnector

__version__ = "0.1.0"
__all__ = ["RecomputeCPUOffloadConnector"]
