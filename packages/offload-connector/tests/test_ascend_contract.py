"""The contract with vllm-ascend, against a double of it: see ascend_double."""

import logging

import ascend_double
import pytest
from sibling_connector import SiblingConnector
from test_connector import TIGHT, load
from test_multi_connector import counters, multi, ours
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from offload_connector import RecomputeCPUOffloadConnector
from offload_connector.plugin import NAME, register
from recompute_scheduler.testing import VICTIMS_MAY_BE_IN_FLIGHT

BY_PATH = KVTransferConfig(kv_connector=NAME, kv_connector_module_path="offload_connector", kv_role="kv_consumer")
BY_NAME = KVTransferConfig(kv_connector=NAME, kv_role="kv_consumer")


@pytest.fixture(autouse=True)
def _fresh_factory(monkeypatch):
    """A process in which no plugin of ours or theirs has run."""
    registry = {name: loader for name, loader in KVConnectorFactory._registry.items() if name != NAME}
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    plain = KVConnectorFactory.register_connector.__func__
    monkeypatch.setattr(KVConnectorFactory, "register_connector", classmethod(getattr(plain, "__wrapped__", plain)))
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    SiblingConnector.claims, SiblingConnector.served = 0, []


ORDERS = {
    "ours first": (register, ascend_double.register_connector),
    "theirs first": (ascend_double.register_connector, register),
    "ours twice around theirs": (register, ascend_double.register_connector, register),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_short_name_is_theirs_in_any_order_and_the_module_path_ours(order, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for plugin in ORDERS[order]:
        plugin()
    assert KVConnectorFactory.get_connector_class(BY_NAME) is ascend_double.RecomputeCPUOffloadConnectorV1
    assert KVConnectorFactory.get_connector_class(BY_PATH) is RecomputeCPUOffloadConnector
    assert "the name means its connector" in caplog.text


def test_without_them_the_short_name_is_ours():
    register()
    assert KVConnectorFactory.get_connector_class(BY_NAME) is RecomputeCPUOffloadConnector
    assert KVConnectorFactory.get_connector_class(BY_PATH) is RecomputeCPUOffloadConnector


def test_any_other_name_can_still_be_taken_once_only():
    register()
    KVConnectorFactory.register_connector("SomeConnector", "some_module", "SomeConnector")
    with pytest.raises(ValueError, match="SomeConnector"):
        KVConnectorFactory.register_connector("SomeConnector", "some_module", "SomeConnector")


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("claims", [0, 32])
def test_in_their_multi_connector_we_restore_what_we_kept(make_engine, mode, ours_first, claims):
    ascend_double.register_connector()
    SiblingConnector.claims = claims
    tight = make_engine(TIGHT, kv_transfer_config=multi(ours_first))
    assert isinstance(tight.scheduler.connector, ascend_double.AscendMultiConnector)
    ample = make_engine(1000, kv_transfer_config=multi(ours_first))
    for engine in (tight, ample):
        load(engine)
        engine.run()
    figures = counters(tight)
    ended = figures["preempted_offloaded"] - figures["preempted_restored"]
    assert figures["preempted_restored"] >= 3
    assert ended == 0 or (VICTIMS_MAY_BE_IN_FLIGHT and mode == "async")
    assert tight.outputs == ample.outputs
    assert SiblingConnector.served == []
    ours(tight).check_integrity()


@pytest.fixture
def their_scheduler(mode):
    return {"sync": ascend_double.RecomputeScheduler, "async": ascend_double.AsyncRecomputeScheduler}[mode]


def test_their_scheduler_keeps_a_victim_through_our_hook(make_engine, their_scheduler):
    tight = make_engine(TIGHT, scheduler_cls=their_scheduler)
    ample = make_engine(1000)
    for engine in (tight, ample):
        load(engine)
        engine.run()
    restored = sum(stats.get("preempted_restored", {}).get("", 0) for stats in tight.connector_stats)
    assert restored >= 3
    assert tight.outputs == ample.outputs


def test_their_scheduler_ends_a_victim_for_which_the_host_has_no_room(make_engine, their_scheduler):
    engine = make_engine(TIGHT, host_blocks=2, scheduler_cls=their_scheduler)
    load(engine)
    engine.run()
    ends = [end.stop_reason for end in engine.ends.values()]
    assert "recomputed" in ends
    usage = engine.scheduler.connector.manager._pool.usage()
    assert usage.free == usage.total
