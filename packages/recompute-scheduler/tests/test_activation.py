"""The flag, the roles and the plugin."""

from types import SimpleNamespace

import pytest
from recording_connector import transfer_config
from vllm.engine.arg_utils import EngineArgs

from recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler
from recompute_scheduler._vllm import require_parameters
from recompute_scheduler.activation import FLAG, Activation, decide, flag
from recompute_scheduler.plugin import register, select_scheduler
from recompute_scheduler.testing import make_config


def config(additional=None, role=None, scheduler_cls=None, async_scheduling=False):
    """The few fields of a VllmConfig that activation reads."""
    return SimpleNamespace(
        additional_config=additional,
        kv_transfer_config=None if role is None else SimpleNamespace(kv_role=role),
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls, async_scheduling=async_scheduling),
    )


@pytest.mark.parametrize(
    ("additional", "expected"),
    [
        ({}, False),
        (None, False),
        ("not a dict", False),
        ({FLAG: True}, True),
        ({FLAG: False}, False),
        ({"scheduler_config": {FLAG: True}}, True),
        ({"scheduler_config": "text"}, False),
        ({FLAG: True, "scheduler_config": {FLAG: True}}, True),
        ({FLAG: False, "scheduler_config": {FLAG: False}}, False),
    ],
)
def test_both_spellings_are_read(additional, expected):
    assert flag(additional) is expected


def test_spellings_that_disagree_are_an_error_that_names_both():
    with pytest.raises(ValueError, match=rf"{FLAG} is True, scheduler_config.{FLAG} is False"):
        flag({FLAG: True, "scheduler_config": {FLAG: False}})


@pytest.mark.parametrize("value", ["true", 1, None, []])
def test_a_flag_that_is_not_a_boolean_is_an_error(value):
    with pytest.raises(ValueError, match="write true or false"):
        flag({FLAG: value})


def test_consumer_is_on():
    assert decide(config({FLAG: True}, "kv_consumer")) is Activation.ON


def test_producer_is_warned_and_ignored(caplog_vllm):
    assert decide(config({FLAG: True}, "kv_producer")) is Activation.OFF
    assert "ignored on a Prefill node" in caplog_vllm.text


@pytest.mark.parametrize(
    ("role", "told"), [("kv_both", "kv_role is 'kv_both'"), (None, "there is no kv-transfer-config")]
)
def test_other_roles_are_an_error_that_says_what_to_write(role, told):
    with pytest.raises(ValueError, match=told) as error:
        decide(config({FLAG: True}, role))
    assert "set kv_role to kv_consumer" in str(error.value)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", None])
def test_without_the_flag_no_role_matters(role):
    assert decide(config({}, role)) is Activation.OFF


@pytest.mark.parametrize(
    ("async_scheduling", "expected"),
    [(False, RecomputeScheduler), (True, AsyncRecomputeScheduler)],
)
def test_the_class_follows_async_scheduling(async_scheduling, expected):
    vllm_config = make_config(kv_transfer_config=transfer_config(), additional_config={FLAG: True})
    vllm_config.scheduler_config.scheduler_cls = None
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    select_scheduler(vllm_config)
    assert vllm_config.scheduler_config.get_scheduler_cls() is expected


def test_a_scheduler_class_already_set_stays():
    vllm_config = config({FLAG: True}, "kv_consumer", scheduler_cls="someone.elses.Scheduler")
    select_scheduler(vllm_config)
    assert vllm_config.scheduler_config.scheduler_cls == "someone.elses.Scheduler"


def test_the_plugin_acts_through_engine_args_and_wraps_them_once():
    register()
    once = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is once
    on = make_config(kv_transfer_config=transfer_config(), additional_config={FLAG: True})
    assert on.scheduler_config.get_scheduler_cls() is RecomputeScheduler
    off = make_config(kv_transfer_config=transfer_config())
    assert off.scheduler_config.scheduler_cls is None
    with pytest.raises(ValueError, match="kv_both"):
        make_config(kv_transfer_config=transfer_config("kv_both"), additional_config={FLAG: True})


def test_another_signature_is_refused_with_the_versions_that_work():
    def schedule(self, budget):
        """As some other vLLM might have it."""

    require_parameters(schedule, "self", "budget")
    with pytest.raises(ImportError, match=r"works with vLLM \d"):
        require_parameters(schedule, "self", "request", "timestamp")
