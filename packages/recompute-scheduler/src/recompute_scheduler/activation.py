"""When the recompute scheduler is on: the flag in `--additional-config`, and the role of this vLLM instance."""

import enum
from typing import Any

from recompute_scheduler._vllm import VllmConfig, init_logger

logger = init_logger("vllm.recompute_scheduler")

FLAG = "recompute_scheduler_enable"
SECTION = "scheduler_config"


class Activation(enum.Enum):
    ON = "on"
    OFF = "off"


def flag(additional_config: Any) -> bool:
    """Read the flag from vLLM's `additional_config`.

    Both spellings are in use: `{"recompute_scheduler_enable": true}` and
    `{"scheduler_config": {"recompute_scheduler_enable": true}}`.

    Raises:
        ValueError: the flag is not true or false, or the two spellings disagree.
    """
    if not isinstance(additional_config, dict):
        return False
    found: dict[str, bool] = {}
    section = additional_config.get(SECTION)
    for place, values in ((FLAG, additional_config), (f"{SECTION}.{FLAG}", section)):
        if not isinstance(values, dict) or FLAG not in values:
            continue
        value = values[FLAG]
        if not isinstance(value, bool):
            raise ValueError(f"additional-config: {place} is {value!r}; write true or false")
        found[place] = value
    if len(set(found.values())) > 1:
        given = ", ".join(f"{place} is {str(value).lower()}" for place, value in found.items())
        raise ValueError(f"additional-config contradicts itself: {given}; keep one of them")
    return any(found.values())


def decide(vllm_config: VllmConfig, requested: bool | None = None) -> Activation:
    """Say whether the recompute scheduler is on for this instance.

    Args:
        vllm_config: vLLM's configuration.
        requested: True when the scheduler class was named by hand; None to read the flag.

    Raises:
        ValueError: it is asked for outside prefill/decode disaggregation, or the flag is malformed.
    """
    if requested is None:
        requested = flag(vllm_config.additional_config)
    if not requested:
        return Activation.OFF
    transfer = vllm_config.kv_transfer_config
    role = transfer.kv_role if transfer is not None else None
    if role == "kv_consumer":
        return Activation.ON
    if role == "kv_producer":
        logger.warning(
            "%s is ignored on a Prefill node (kv_role is kv_producer): only Decode nodes preempt with their KV kept.",
            FLAG,
        )
        return Activation.OFF
    found = "there is no kv-transfer-config" if role is None else f"kv_role is {role!r}"
    raise ValueError(
        f"{FLAG} works only on the Decode nodes of a prefill/decode deployment, but here {found}; "
        "set kv_role to kv_consumer in --kv-transfer-config, or take the flag out of --additional-config"
    )
