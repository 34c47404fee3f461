"""The vLLM plugin: the connector by its short name, ahead of its siblings in a MultiConnector, and safe beside them."""

import functools
from typing import Any

from offload_connector._vllm import EngineArgs, KVConnectorFactory, KVTransferConfig, VllmConfig, init_logger

logger = init_logger("vllm.offload_connector")

NAME = "RecomputeCPUOffloadConnector"


def put_first(transfer: KVTransferConfig | None) -> None:
    """Move our connector to the front of a MultiConnector's children; the others keep their order.

    vLLM's MultiConnector loads from the first child that has tokens for a request. For a preempted request we have all
    of them, with the last partial block, and a sibling has full blocks at most, so we must be asked first; for every
    other request we have nothing to offer and the order of the others decides, as configured.
    """
    if transfer is None or transfer.kv_connector != "MultiConnector":
        return
    children = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        return  # vLLM says what is wrong with them
    ordered = sorted(children, key=lambda child: child.get("kv_connector") != NAME)
    if ordered != children:
        logger.info("%s is moved ahead of the other connectors, so that it restores what it kept", NAME)
        transfer.kv_connector_extra_config["connectors"] = ordered


def known_only() -> None:
    """Let MultiConnector export the metrics of its children that have some, and pass over the others.

    vLLM 0.32 takes it for an error when a child reports statistics and exports no metrics, as its MooncakeConnector
    does: the first failed transfer would end the API server, and only where a MultiConnector brings us in.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorPromMetrics

    observe = MultiKVConnectorPromMetrics.observe
    if hasattr(observe, "_offload_connector"):
        return

    @functools.wraps(observe)
    def observe_known(self: MultiKVConnectorPromMetrics, data: dict[str, Any], engine_idx: int = 0) -> None:
        observe(self, {name: stats for name, stats in data.items() if name in self._prom_metrics}, engine_idx)

    observe_known._offload_connector = True  # type: ignore[attr-defined]
    MultiKVConnectorPromMetrics.observe = observe_known  # type: ignore[method-assign]


def register_name() -> None:
    """Give our connector its short name, unless another package has taken it or takes it later.

    vllm-ascend has a connector of the same name, plugins load in no fixed order, and vLLM's factory raises for a name
    that is taken. So the name is the other's in either order; `"kv_connector_module_path": "offload_connector"` means
    ours in any case.
    """
    known = KVConnectorFactory._registry.get(NAME)
    if known is None:
        KVConnectorFactory.register_connector(NAME, "offload_connector", NAME)
        KVConnectorFactory._registry[NAME]._offload_connector = True  # type: ignore[attr-defined]
    elif not hasattr(known, "_offload_connector"):
        _tell_whose_name()
    original = KVConnectorFactory.register_connector.__func__  # type: ignore[attr-defined]
    if hasattr(original, "_offload_connector"):
        return

    @functools.wraps(original)
    def register_connector(cls: type[KVConnectorFactory], name: str, *args: Any, **kwargs: Any) -> None:
        if name == NAME and hasattr(cls._registry.get(NAME), "_offload_connector"):
            del cls._registry[NAME]
            _tell_whose_name()
        original(cls, name, *args, **kwargs)

    register_connector._offload_connector = True  # type: ignore[attr-defined]
    KVConnectorFactory.register_connector = classmethod(register_connector)  # type: ignore[method-assign,assignment]


def _tell_whose_name() -> None:
    logger.info(
        'Another package (vllm-ascend, say) has registered %s: the name means its connector. Add "%s": "%s" beside '
        '"kv_connector" for the one of offload-connector.',
        NAME,
        "kv_connector_module_path",
        "offload_connector",
    )


def register() -> None:
    """Entry point `vllm.general_plugins`; vLLM calls it in every process, possibly more than once."""
    register_name()
    create = EngineArgs.create_engine_config
    if hasattr(create, "_offload_connector"):
        return

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        vllm_config = create(self, *args, **kwargs)
        put_first(vllm_config.kv_transfer_config)
        known_only()
        return vllm_config

    create_engine_config._offload_connector = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
