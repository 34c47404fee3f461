"""The vLLM plugin: `--additional-config '{"recompute_scheduler_enable": true}'` selects the scheduler class."""

import functools
from typing import Any

from recompute_scheduler._vllm import EngineArgs, VllmConfig, init_logger
from recompute_scheduler.activation import FLAG, Activation, decide

logger = init_logger("vllm.recompute_scheduler")

SCHEDULER = "recompute_scheduler.RecomputeScheduler"
ASYNC_SCHEDULER = "recompute_scheduler.AsyncRecomputeScheduler"


def select_scheduler(vllm_config: VllmConfig) -> None:
    """Set the scheduler class of `vllm_config` if its flag asks for it and its role allows it.

    Raises:
        ValueError: see `recompute_scheduler.activation.decide`.
    """
    if decide(vllm_config) is Activation.OFF:
        return
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.scheduler_cls is not None:
        # vllm-ascend's platform installs its own scheduler for the same flag; --scheduler-cls is the user's word.
        logger.info("%s: the scheduler class %s is already set and stays.", FLAG, scheduler_config.scheduler_cls)
        return
    scheduler_config.scheduler_cls = ASYNC_SCHEDULER if scheduler_config.async_scheduling else SCHEDULER
    logger.info("%s: using %s", FLAG, scheduler_config.scheduler_cls)


def register() -> None:
    """Entry point `vllm.general_plugins`; vLLM calls it in every process, possibly more than once.

    The class is chosen when the engine's configuration is complete, because async scheduling is settled there, by the
    platform last of all.
    """
    create = EngineArgs.create_engine_config
    if hasattr(create, "_recompute_scheduler"):
        return

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        vllm_config = create(self, *args, **kwargs)
        select_scheduler(vllm_config)
        return vllm_config

    create_engine_config._recompute_scheduler = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
