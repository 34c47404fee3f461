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


def settings(additional_config: Any, *keys: str) -> dict[str, Any]:
    """Read `keys` from vLLM's `additional_config`.

    Two spellings are in use, at the top and in a section: `{"key": value}` and `{"scheduler_config": {"key": value}}`.

    Returns:
        The values of those keys that are there.

    Raises:
        ValueError: the two spellings disagree.
    """
    if not isinstance(additional_config, dict):
        return {}
    section = additional_config.get(SECTION)
    section = section if isinstance(section, dict) else {}
    found = {}
    for key in keys:
        values = [place[key] for place in (additional_config, section) if key in place]
        if len(values) == 2 and values[0] != values[1]:
            raise ValueError(
                f"additional-config contradicts itself: {key} is {values[0]!r}, {SECTION}.{key} is {values[1]!r}; "
                "keep one of them"
            )
        if values:
            found[key] = values[0]
    return found


def flag(additional_config: Any) -> bool:
    """Read the flag from vLLM's `additional_config`.

    Raises:
        ValueError: it is not true or false, or its two spellings disagree.
    """
    value = settings(additional_config, FLAG).get(FLAG, False)
    if not isinstance(value, bool):
        raise ValueError(f"additional-config: {FLAG} is {value!r}; write true or false")
    return value


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
