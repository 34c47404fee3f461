"""The keys of kv_connector_extra_config and their errors."""

from types import SimpleNamespace

import pytest

from offload_connector.config import DEFAULT_TOTAL_BYTES, PER_RANK, SHARE_PREFIXES, TOTAL, VERIFY, OffloadConfig

GIB = 1 << 30


def vllm_config(extra=None, role="kv_consumer", tp=1, dp=1):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(world_size=tp, data_parallel_size=dp),
    )


def test_defaults():
    config = OffloadConfig.from_vllm(vllm_config())
    assert config == OffloadConfig(cpu_bytes_per_rank=DEFAULT_TOTAL_BYTES, share_prefixes=False, verify=False)
    assert DEFAULT_TOTAL_BYTES == 8 * GIB


def test_the_total_is_divided_by_all_cards_of_the_instance():
    config = OffloadConfig.from_vllm(vllm_config({TOTAL: 16 * GIB}, tp=8, dp=2))
    assert config.cpu_bytes_per_rank == 1 * GIB


def test_per_rank_wins():
    config = OffloadConfig.from_vllm(vllm_config({TOTAL: 16 * GIB, PER_RANK: 3 * GIB}, tp=8, dp=2))
    assert config.cpu_bytes_per_rank == 3 * GIB


@pytest.mark.parametrize("key", [TOTAL, PER_RANK])
@pytest.mark.parametrize("value", [0, -1, 1.5, "16GiB", True, None])
def test_a_budget_that_is_no_positive_number_of_bytes_is_an_error(key, value):
    with pytest.raises(ValueError, match=f"{key} is {value!r}; write a positive whole number of bytes"):
        OffloadConfig.parse({key: value}, ranks=1)


@pytest.mark.parametrize("key", [SHARE_PREFIXES, VERIFY])
def test_switches(key):
    assert OffloadConfig.parse({key: True}, 1) != OffloadConfig.parse({key: False}, 1)
    for value in (1, "true", None):
        with pytest.raises(ValueError, match=f"{key} is {value!r}; write true or false"):
            OffloadConfig.parse({key: value}, ranks=1)


def test_an_unknown_key_is_named():
    with pytest.raises(ValueError, match="unknown key 'cpu_byte_to_use'") as error:
        OffloadConfig.parse({"cpu_byte_to_use": 1}, ranks=1)
    assert PER_RANK in str(error.value)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_other_roles_are_an_error(role):
    with pytest.raises(ValueError, match=f"kv_role is '{role}'.*kv_consumer"):
        OffloadConfig.from_vllm(vllm_config(role=role))


def test_without_a_transfer_config_too():
    with pytest.raises(ValueError, match="kv_role is None"):
        OffloadConfig.from_vllm(SimpleNamespace(kv_transfer_config=None))


def test_a_total_too_small_to_divide_names_the_key_that_was_written():
    with pytest.raises(ValueError, match=rf"{TOTAL} is 5, which is divided by 8 cards"):
        OffloadConfig.parse({TOTAL: 5}, ranks=8)
