import copy
import json

import pytest
from vllm.config import KVTransferConfig

from offload_connector.cli.budget import Deployment
from offload_connector.cli.lint import lint_additional, lint_together, lint_transfer
from offload_connector.cli.snippets import additional_config, kv_transfer_config, offload_entry

ALONE = Deployment(1, 1, 1, 1)
DP2TP8 = Deployment(8, 1, 2, 16)
GOOD = kv_transfer_config(16 << 30, DP2TP8, "MooncakeConnectorV1", 1, 1)


def changed(change, config=GOOD):
    config = copy.deepcopy(config)
    change(config)
    return config


def children(config):
    return config["kv_connector_extra_config"]["connectors"]


def ours(config):
    return children(config)[1]


def bad(config, deployment=DP2TP8):
    return [(f.level, f.where, f.message) for f in lint_transfer(config, deployment).findings if f.level != "note"]


def test_what_plan_prints_is_clean_and_vllm_takes_it():
    for config in (GOOD, offload_entry(16 << 30)):
        found = lint_transfer(config, DP2TP8)
        assert found.findings == []
        assert found.per_rank == 16 << 30
        assert found.has_offload
        assert KVTransferConfig(**config).kv_role == "kv_consumer"
    assert lint_additional(additional_config()) == (True, [])


OFFLOAD_EXTRA = "connectors[1].kv_connector_extra_config"
FAULTS = {
    "misspelt budget": (
        lambda c: ours(c)["kv_connector_extra_config"].update(cpu_bytes_per_rank=1),
        ("error", f"{OFFLOAD_EXTRA}.cpu_bytes_per_rank", "did you mean 'cpu_bytes_to_use_per_rank'?"),
    ),
    "unlike any key": (
        lambda c: ours(c)["kv_connector_extra_config"].update(zzz=1),
        ("error", f"{OFFLOAD_EXTRA}.zzz", "there are cpu_bytes_to_use_per_rank, cpu_bytes_to_use"),
    ),
    "budget as text": (
        lambda c: ours(c)["kv_connector_extra_config"].update(cpu_bytes_to_use_per_rank="16GiB"),
        ("error", f"{OFFLOAD_EXTRA}.cpu_bytes_to_use_per_rank", "write a positive whole number of bytes"),
    ),
    "negative budget": (
        lambda c: ours(c)["kv_connector_extra_config"].update(cpu_bytes_to_use_per_rank=-1),
        ("error", f"{OFFLOAD_EXTRA}.cpu_bytes_to_use_per_rank", "is -1"),
    ),
    "switch as a number": (
        lambda c: ours(c)["kv_connector_extra_config"].update(enable_offload_prefix_caching=1),
        ("error", f"{OFFLOAD_EXTRA}.enable_offload_prefix_caching", "write true or false"),
    ),
    "both budgets": (
        lambda c: ours(c)["kv_connector_extra_config"].update(cpu_bytes_to_use=1 << 40),
        ("warning", OFFLOAD_EXTRA, "cpu_bytes_to_use_per_rank wins"),
    ),
    "budget a level too high": (
        lambda c: ours(c).update(cpu_bytes_to_use_per_rank=1 << 34),
        ("error", "connectors[1].cpu_bytes_to_use_per_rank", "belongs one level deeper"),
    ),
    "budget beside the children": (
        lambda c: c["kv_connector_extra_config"].update(cpu_bytes_to_use_per_rank=1 << 34),
        ("error", ".cpu_bytes_to_use_per_rank", "belongs into the kv_connector_extra_config of the Recompute"),
    ),
    "failure policy in a child": (
        lambda c: children(c)[0].update(kv_load_failure_policy="recompute"),
        ("error", "connectors[0].kv_load_failure_policy", "move it to the top level"),
    ),
    "unknown failure policy": (
        lambda c: c.update(kv_load_failure_policy="retry"),
        ("error", ".kv_load_failure_policy", "write one of recompute, fail"),
    ),
    "unknown top-level key": (
        lambda c: c.update(kv_rol="kv_consumer"),
        ("error", ".kv_rol", "did you mean 'kv_role'?"),
    ),
    "no role": (lambda c: c.pop("kv_role"), ("error", ".kv_role", "is missing; write one of")),
    "unknown role": (lambda c: c.update(kv_role="decode"), ("error", ".kv_role", "is 'decode'; write one of")),
    "our child as producer": (
        lambda c: ours(c).update(kv_role="kv_producer"),
        ("error", "connectors[1].kv_role", "write 'kv_consumer'"),
    ),
    "mixed roles at the top": (
        lambda c: c.update(kv_role="kv_both"),
        ("error", "--kv-transfer-config.kv_role", "on a Decode node write 'kv_consumer'"),
    ),
    "sibling of another role": (
        lambda c: children(c)[0].update(kv_role="kv_producer"),
        ("warning", "connectors[0].kv_role", "the top level has 'kv_consumer'"),
    ),
    "misspelt connector": (
        lambda c: ours(c).update(kv_connector="RecomputeCpuOffloadConnector"),
        ("error", "connectors[1].kv_connector", "did you mean 'RecomputeCPUOffloadConnector'?"),
    ),
    "no connector name": (lambda c: c.pop("kv_connector"), ("error", ".kv_connector", "is None")),
    "no children": (
        lambda c: c["kv_connector_extra_config"].update(connectors=[]),
        ("error", ".connectors", "needs a list of connectors"),
    ),
    "a child that is text": (
        lambda c: children(c).append("MooncakeConnectorV1"),
        ("error", "connectors[2]", "this is a string; write an object"),
    ),
    "ours twice": (
        lambda c: children(c).append(offload_entry(1 << 30)),
        ("error", ".connectors", "more than once"),
    ),
    "extra config as a list": (
        lambda c: ours(c).update(kv_connector_extra_config=[]),
        ("error", "connectors[1].kv_connector_extra_config", "is a list; write an object"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_place_and_what_to_write(name):
    change, (level, where, message) = FAULTS[name]
    matching = [
        finding
        for finding in bad(changed(change))
        if finding[0] == level and finding[1].endswith(where) and message in finding[2]
    ]
    assert len(matching) == 1, bad(changed(change))


@pytest.mark.parametrize("config", [[], "x", None, 3])
def test_something_other_than_an_object_is_an_error(config):
    assert [level for level, _, _ in bad(config)] == ["error"]
    assert [finding.level for finding in lint_additional(config)[1]] == ["error"]


def test_the_total_budget_shows_how_it_is_divided():
    found = lint_transfer(
        changed(lambda c: ours(c).update(kv_connector_extra_config={"cpu_bytes_to_use": 1 << 34})), DP2TP8
    )
    assert found.per_rank == (1 << 34) // 16
    (note,) = found.findings
    assert note.level == "note"
    assert "17179869184 / 16 ranks (tp 8 x pp 1 x dp 2) = 1073741824 bytes per rank" in note.message


def test_no_budget_shows_the_default():
    found = lint_transfer({"kv_connector": "RecomputeCPUOffloadConnector", "kv_role": "kv_consumer"}, ALONE)
    assert found.per_rank == 8 << 30
    assert "the default of 8589934592 bytes" in found.findings[0].message


def test_switches_for_debugging_and_trying_out_are_noted():
    def change(config):
        extra = ours(config)["kv_connector_extra_config"]
        extra.update(verify_restored_blocks=True, enable_offload_prefix_caching=True)

    found = lint_transfer(changed(change), DP2TP8)
    assert [f.level for f in found.findings] == ["note", "note"]


def test_the_guides_multi_connector_is_clean_but_for_its_comma():
    from offload_connector.cli.json_text import read_json

    text = json.dumps(GOOD, indent=2).replace("17179869184", "17179869184,")
    value, (comma,) = read_json(text, "--kv-transfer-config")
    assert "comma before '}'" in comma.message
    assert bad(value) == []


FLAG = "recompute_scheduler_enable"
ADDITIONAL = [
    ({}, False, []),
    ({FLAG: True}, True, []),
    ({"scheduler_config": {FLAG: True}}, True, []),
    ({FLAG: True, "scheduler_config": {FLAG: True}}, True, []),
    ({FLAG: True, "scheduler_config": {FLAG: False}}, None, ["keep one of them"]),
    ({FLAG: "true"}, None, ["write true or false"]),
    ({"recompute_schedule_enable": True}, None, [f"did you mean '{FLAG}'?"]),
    ({"scheduler_config": {"recompute_scheduler_enabled": True}}, None, [f"did you mean '{FLAG}'?"]),
    ({FLAG: True, "torchair_graph_config": {"enabled": True}}, True, []),
    ({FLAG: True, "recompute_fallback": "prefill"}, True, ['write "local" or "resend"']),
    ({FLAG: True, "recompute_fallback": "resend", "recompute_fallback_max_local_tokens": 512}, True, []),
    ({FLAG: True, "recompute_fallback_max_local_tokens": 512}, True, ['"recompute_fallback": "resend"']),
    ({"recompute_fallback": "resend", "recompute_fallback_max_local_tokens": -1}, False, ["0 or more"]),
]


@pytest.mark.parametrize(("config", "flag", "messages"), ADDITIONAL)
def test_the_schedulers_keys(config, flag, messages):
    found, findings = lint_additional(config)
    assert found is flag
    assert len(findings) == len(messages)
    for finding, message in zip(findings, messages, strict=True):
        assert message in finding.message


ROLES = [
    ("kv_consumer", True, True, []),
    ("kv_consumer", True, False, [("error", "nothing is ever kept without it")]),
    ("kv_consumer", False, True, [("warning", "preempted requests are recomputed")]),
    ("kv_consumer", False, False, []),
    ("kv_producer", False, True, [("warning", "is ignored on a Prefill node")]),
    ("kv_producer", False, False, []),
    ("kv_both", False, True, [("error", "is refused where kv_role is 'kv_both'")]),
    (None, False, True, [("error", "--kv-transfer-config with kv_role 'kv_consumer' is missing")]),
]


@pytest.mark.parametrize(("role", "with_ours", "flag", "expected"), ROLES)
def test_the_two_options_are_held_against_each_other(role, with_ours, flag, expected):
    config = {"kv_connector": "MooncakeConnectorV1", "kv_role": role}
    if with_ours:
        config = changed(lambda c: c.update(kv_role=role))
    transfer = None if role is None else lint_transfer(config, ALONE)
    findings = lint_together(transfer, flag)
    assert len(findings) == len(expected)
    for finding, (level, message) in zip(findings, expected, strict=True):
        assert finding.level == level
        assert message in finding.message
