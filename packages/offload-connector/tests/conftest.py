import logging

import pytest
from byte_ranks import ByteRanks

from offload_connector.config import PER_RANK
from recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler
from recompute_scheduler.testing import ScriptedEngine, make_config, make_kv_cache_config

SCHEDULERS = {"sync": RecomputeScheduler, "async": AsyncRecomputeScheduler}
BLOCK_BYTES = 2 * 2 * 16 * 8 * 4
"""Bytes of one block of ByteRanks' two layers: K and V, 16 tokens, 8 values of 4 bytes."""


def transfer_config(**extra):
    return {
        "kv_connector": "RecomputeCPUOffloadConnector",
        "kv_connector_module_path": "offload_connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": extra,
    }


@pytest.fixture(params=["sync", "async"])
def mode(request):
    """Every test that uses it runs with vLLM's Scheduler and with its AsyncScheduler."""
    return request.param


@pytest.fixture
def make_engine(mode):
    """Return a function that builds an engine whose connector really stores and loads bytes."""
    made = []

    def make(
        num_blocks, host_blocks=1000, ranks=1, options=None, policy="recompute", scheduler_cls=None, **engine_args
    ):
        extra = {PER_RANK: host_blocks * BLOCK_BYTES, **(options or {})}
        transfer = {**transfer_config(**extra), "kv_load_failure_policy": policy}
        engine_args.setdefault("kv_transfer_config", transfer)
        config = make_config(async_scheduling=mode == "async", **engine_args)
        config.parallel_config.world_size = ranks
        kv_cache_config = make_kv_cache_config(num_blocks)
        workers = ByteRanks(config, kv_cache_config, ranks)
        engine = ScriptedEngine(scheduler_cls or SCHEDULERS[mode], config, kv_cache_config, workers)
        workers.scheduler = engine.scheduler
        made.append(workers)
        return engine

    yield make
    for workers in made:
        workers.shutdown()


@pytest.fixture
def caplog_vllm(caplog):
    """caplog for vLLM's loggers, which do not propagate."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="vllm")
    yield caplog
    logger.removeHandler(caplog.handler)
