"""What the harness's vLLM plugin does in every process of a server."""

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from pd_integration import plugin


def test_a_failed_transfer_can_be_reported_beside_other_connectors() -> None:
    """MultiConnector looks the class of a child's statistics up by name; a name it can't find ends the API server."""
    plugin.register()
    plugin.register()
    stats = MooncakeKVConnectorStats()
    stats.record_failed_recv()
    rebuilt = MultiConnector.build_kv_connector_stats({"MooncakeConnectorCPU": stats.data})
    assert rebuilt is not None
    assert rebuilt.data["MooncakeConnectorCPU"].data == stats.data
