"""The connector's part of `--kv-transfer-config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_connector._vllm import VllmConfig

PER_RANK = "cpu_bytes_to_use_per_rank"
TOTAL = "cpu_bytes_to_use"
SHARE_PREFIXES = "enable_offload_prefix_caching"
VERIFY = "verify_restored_blocks"
KEYS = (PER_RANK, TOTAL, SHARE_PREFIXES, VERIFY)
DEFAULT_TOTAL_BYTES = 8 << 30
ROLE = "kv_consumer"


@dataclass(frozen=True)
class OffloadConfig:
    """What an operator may set.

    Attributes:
        cpu_bytes_per_rank: pinned host memory that each rank (card) may hold, in bytes.
        share_prefixes: saved requests share host blocks of the same prefix-cache hash.
        verify: checksum every block when it is stored and after it is loaded. For debugging: it reads all bytes twice.
    """

    cpu_bytes_per_rank: int
    share_prefixes: bool = False
    verify: bool = False

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> OffloadConfig:
        """Read and check `kv_connector_extra_config` and `kv_role`.

        Raises:
            ValueError: names the key, its value and what to write instead.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_role != ROLE:
            role = None if transfer is None else transfer.kv_role
            raise ValueError(
                f"RecomputeCPUOffloadConnector: kv_role is {role!r}; it works only on the Decode nodes of a "
                f'prefill/decode deployment: set "kv_role": "{ROLE}"'
            )
        parallel = vllm_config.parallel_config
        ranks = parallel.world_size * parallel.data_parallel_size
        return cls.parse(transfer.kv_connector_extra_config, ranks)

    @classmethod
    def parse(cls, extra: dict[str, Any], ranks: int) -> OffloadConfig:
        """Read the keys of `extra`; `ranks` is the number of cards that `cpu_bytes_to_use` is divided by."""
        for key in extra:
            if key not in KEYS:
                raise ValueError(
                    f"RecomputeCPUOffloadConnector: unknown key {key!r} in kv_connector_extra_config; "
                    f"known keys are {', '.join(KEYS)}"
                )
        total = _positive_bytes(extra, TOTAL, DEFAULT_TOTAL_BYTES)
        if PER_RANK not in extra and total < ranks:
            raise ValueError(
                f"RecomputeCPUOffloadConnector: {TOTAL} is {total}, which is divided by {ranks} cards; write the bytes "
                "for all of them together, for example 17179869184 for 16 GiB"
            )
        return cls(
            cpu_bytes_per_rank=_positive_bytes(extra, PER_RANK, total // ranks),
            share_prefixes=_switch(extra, SHARE_PREFIXES),
            verify=_switch(extra, VERIFY),
        )


def _positive_bytes(extra: dict[str, Any], key: str, default: int) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"RecomputeCPUOffloadConnector: {key} is {value!r}; write a positive whole number of bytes, "
            "for example 17179869184 for 16 GiB"
        )
    return value


def _switch(extra: dict[str, Any], key: str) -> bool:
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"RecomputeCPUOffloadConnector: {key} is {value!r}; write true or false")
    return value
