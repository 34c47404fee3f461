"""Names known without an import are those that their owners use."""

import dataclasses

from vllm.config import KVTransferConfig

from offload_connector import plugin
from offload_connector.cli import names
from recompute_scheduler import activation, fallback


def test_the_connectors_name_is_what_the_plugin_registers():
    assert plugin.NAME == names.CONNECTOR


def test_transfer_keys_are_vllms():
    assert {field.name for field in dataclasses.fields(KVTransferConfig)} == set(names.TRANSFER_KEYS)


def test_scheduler_keys_are_the_schedulers():
    ours = (names.FLAG, names.SECTION, names.FALLBACK, names.MAX_LOCAL_TOKENS)
    assert ours == (activation.FLAG, activation.SECTION, fallback.FALLBACK, fallback.MAX_LOCAL_TOKENS)
