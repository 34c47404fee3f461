"""Models whose running requests must not be left out of a step are told from others when the scheduler is made."""

import pytest
import torch
from conftest import SCHEDULERS
from recording_connector import transfer_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from recompute_scheduler.testing import (
    BLOCK_SIZE,
    VICTIMS_MAY_BE_IN_FLIGHT,
    ScriptedEngine,
    make_config,
    make_kv_cache_config,
)


def make_engine(mode, drafts):
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    states = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((8, 64),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        num_speculative_blocks=drafts,
    )
    config = make_config(async_scheduling=mode == "async", kv_transfer_config=transfer_config())
    return ScriptedEngine(SCHEDULERS[mode], config, make_kv_cache_config(100, [attention, states]))


@pytest.mark.parametrize("drafts", [0, 2])
def test_recurrent_states_with_drafts_and_asynchronous_scheduling_are_warned_of(mode, drafts, caplog_vllm):
    make_engine(mode, drafts)
    warned = "--no-async-scheduling" in caplog_vllm.text
    assert warned == (mode == "async" and drafts > 0 and not VICTIMS_MAY_BE_IN_FLIGHT)
