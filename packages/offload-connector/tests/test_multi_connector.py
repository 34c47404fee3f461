"""Inside vLLM's MultiConnector: in either position, and beside a connector that claims the same requests."""

from types import SimpleNamespace

import pytest
from conftest import BLOCK_BYTES, transfer_config
from sibling_connector import SiblingConnector
from test_connector import TIGHT, all_restored, load
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorPromMetrics
from vllm.engine.arg_utils import EngineArgs

from offload_connector.config import PER_RANK
from offload_connector.metrics import OffloadStats
from offload_connector.plugin import NAME, known_only, put_first, register

SIBLING = {
    "kv_connector": "SiblingConnector",
    "kv_connector_module_path": "sibling_connector",
    "kv_role": "kv_consumer",
}


@pytest.fixture(autouse=True)
def _fresh_sibling():
    register()
    SiblingConnector.claims = 0
    SiblingConnector.served = []


def multi(ours_first):
    children = [transfer_config(**{PER_RANK: 1000 * BLOCK_BYTES}), SIBLING]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": children if ours_first else children[::-1]},
    }


def ours(engine):
    (connector,) = [c for c in engine.scheduler.connector._connectors if hasattr(c, "manager")]
    return connector.manager


def counters(engine):
    stats = OffloadStats()
    for data in engine.connector_stats:
        if NAME in data:
            # Before vLLM 0.32 each child's statistics are an object of their own.
            stats.aggregate(OffloadStats(data=getattr(data[NAME], "data", data[NAME])))
    return {name: sum(values.values()) for name, values in stats.data.items() if isinstance(values, dict)}


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("claims", [0, 16, 32])
def test_we_restore_what_we_kept_whatever_a_sibling_claims(make_engine, mode, ours_first, claims):
    SiblingConnector.claims = claims
    engine = make_engine(TIGHT, kv_transfer_config=multi(ours_first))
    load(engine)
    engine.run()
    figures = counters(engine)
    assert all_restored(figures, mode)
    assert figures["preempted_restored"] >= 3
    assert SiblingConnector.served == []
    ours(engine).check_integrity()
    usage = ours(engine)._pool.usage()
    assert usage.free == usage.total


def test_a_state_that_loses_is_dropped(make_engine):
    """A sibling that wins all the same, as one may that holds more: what we kept goes, and nothing leaks."""
    SiblingConnector.claims = 10_000
    engine = make_engine(TIGHT, kv_transfer_config=multi(ours_first=True))
    engine.scheduler.connector._connectors.reverse()
    engine.scheduler.kv_cache_manager.enable_caching = False
    workers = engine.worker

    def blind(rank, cache, request_id, count):
        """The sibling loads nothing, so what is read is not checked."""

    workers._forward = blind
    for connector in workers.connectors:
        connector._connectors.reverse()
    load(engine)
    engine.run()
    assert SiblingConnector.served
    assert "preempted_restored" not in counters(engine)
    ours(engine).check_integrity()
    usage = ours(engine)._pool.usage()
    assert usage.free == usage.total


def test_the_plugin_moves_our_connector_ahead():
    transfer = KVTransferConfig(**multi(ours_first=False))
    put_first(transfer)
    names = [child["kv_connector"] for child in transfer.kv_connector_extra_config["connectors"]]
    assert names == [NAME, "SiblingConnector"]


def malformed():
    children = {"connectors": ["SiblingConnector"]}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_consumer", kv_connector_extra_config=children)


@pytest.mark.parametrize(
    "transfer", [None, KVTransferConfig(**transfer_config()), KVTransferConfig(**multi(True)), malformed()]
)
def test_other_configurations_stay_as_they_are(transfer):
    before = repr(transfer)
    put_first(transfer)
    assert repr(transfer) == before


def test_registering_twice_changes_nothing():
    once = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is once


def test_a_sibling_without_metrics_does_not_end_the_server():
    """vLLM's MooncakeConnector reports a failed transfer but exports no metrics; ours are exported all the same."""
    observed = []
    metrics = MultiKVConnectorPromMetrics.__new__(MultiKVConnectorPromMetrics)
    metrics._prom_metrics = {NAME: SimpleNamespace(observe=lambda data, engine: observed.append((data, engine)))}
    known_only()
    known_only()
    reported = {"MooncakeConnector": {"num_failed_recvs": 1}, NAME: {"blocks_stored": {"": 3}}}
    if not hasattr(KVConnectorStats, "to_dict"):
        # Before vLLM 0.32 each child's statistics travel as an object, which arrives as its fields.
        reported = {name: {"data": data} for name, data in reported.items()}
    metrics.observe(reported, 2)
    assert observed == [({"blocks_stored": {"": 3}}, 2)]
