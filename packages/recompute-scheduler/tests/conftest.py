import logging

import pytest
from recording_connector import RecordingConnector, transfer_config

from recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler
from recompute_scheduler.testing import ScriptedEngine, make_config, make_kv_cache_config

SCHEDULERS = {"sync": RecomputeScheduler, "async": AsyncRecomputeScheduler}


@pytest.fixture(params=["sync", "async"])
def mode(request):
    """Every test that uses it runs with vLLM's Scheduler and with its AsyncScheduler."""
    return request.param


@pytest.fixture
def make_engine(mode):
    """Return a function that builds an engine with a recording connector."""

    def make(num_blocks, scheduler_cls=None, **engine_args):
        engine_args.setdefault("kv_transfer_config", transfer_config())
        config = make_config(async_scheduling=mode == "async", **engine_args)
        return ScriptedEngine(scheduler_cls or SCHEDULERS[mode], config, make_kv_cache_config(num_blocks))

    return make


@pytest.fixture(autouse=True)
def _fresh_recording():
    RecordingConnector.reset()


@pytest.fixture
def caplog_vllm(caplog):
    """caplog for vLLM's loggers, which do not propagate."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="vllm")
    yield caplog
    logger.removeHandler(caplog.handler)
