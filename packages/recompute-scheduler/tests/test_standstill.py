"""Requests that hold each other's blocks after their loads, none of them able to run."""

from types import SimpleNamespace

import pytest
from recording_connector import SilentConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from recompute_scheduler.testing import BLOCK_SIZE, worker_output

LOADED = 5 * BLOCK_SIZE
"""Tokens that a load brings: a request of 6 blocks then needs one more. Two such loads fill a cache of 10."""


class LoadingConnector(SilentConnector):
    """Loads LOADED tokens for every new request, behind the step; each load ends in the step after its start."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked = set()
        self.offered = []
        self.started = []

    def update_state_before_preempt(self, request, block_ids, num_computed_tokens):
        self.offered.append((request.request_id, [list(ids) for ids in block_ids], num_computed_tokens))
        return False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return (0, False) if request.request_id in self.asked else (LOADED, True)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.asked.add(request.request_id)
        if num_external_tokens:
            self.started.append((request.request_id, [i for ids in blocks.get_block_ids() for i in ids]))

    def build_connector_meta(self, scheduler_output):
        meta = KVConnectorMetadata()
        meta.loads, self.started = self.started, []
        return meta


class Loads:
    """The worker side: says of failed loads what its vLLM asks for, their requests or their blocks."""

    def __init__(self, failing):
        self.failing = failing
        self.running = []
        self.ended = []

    def __call__(self, scheduled):
        self.ended, self.running = self.running, scheduled.kv_connector_metadata.loads
        return worker_output(self, set())

    def get_finished(self, _):
        return None, {name for name, _ in self.ended}

    def get_transfer_results(self, _):
        ended, self.ended = {name for name, _ in self.ended}, []
        failed = {name for name in ended if name in self.failing}
        return SimpleNamespace(finished_sending=None, finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self):
        return {block for name, blocks in self.ended if name in self.failing for block in blocks}

    def get_kv_connector_stats(self):
        return None

    def build_connector_worker_meta(self):
        return None


@pytest.fixture
def stuck(make_engine, monkeypatch):
    """An engine in which two loads fill the cache: vLLM's own reservation can fall short, here it is taken out."""

    def make(failing=(), **options):
        transfer = {
            "kv_connector": "LoadingConnector",
            "kv_connector_module_path": "test_standstill",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
        }
        engine = make_engine(11, kv_transfer_config=transfer, **options)
        engine.worker = Loads(failing)
        monkeypatch.setattr(engine.scheduler, "_inflight_prefill_reserved_blocks", lambda: 0)
        monkeypatch.setattr(engine.scheduler, "scheduler_reserve_full_isl", False)
        return engine

    return make


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_loaded_requests_do_not_hold_each_other_up_for_ever(stuck, policy):
    engine = stuck(scheduling_policy=policy)
    for name in "ab":
        engine.add(name, range(LOADED + 1), 12)
    engine.run(max_steps=60)
    assert {name: len(tokens) for name, tokens in engine.outputs.items()} == {"a": 12, "b": 12}
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 10


def test_what_gives_way_is_offered_to_the_hook_with_what_its_load_brought(stuck):
    engine = stuck()
    for name in "ab":
        engine.add(name, range(LOADED + 1), 12)
    tables = {}
    for _ in range(60):
        for name in "ab":
            tables.setdefault(name, [list(ids) for ids in engine.scheduler.kv_cache_manager.get_block_ids(name)])
        engine.step()
        if engine.scheduler.connector.offered:
            break
        tables = {}
    ((name, blocks, num_computed),) = engine.scheduler.connector.offered
    assert (blocks, num_computed) == (tables[name], LOADED)
    engine.run(max_steps=60)
    offered = len(engine.scheduler.connector.offered)
    assert engine.scheduler.recompute_counters == {"preempted": offered, "recomputed": offered}


def test_a_failed_load_gives_its_blocks_back_behind_one_that_cannot_run(stuck):
    engine = stuck(failing="ab")
    engine.scheduler.scheduler_reserve_full_isl = True
    engine.add("a", range(LOADED + BLOCK_SIZE), 4)
    engine.add("b", range(LOADED + 1), 4)
    engine.run(max_steps=60)
    assert {name: len(tokens) for name, tokens in engine.outputs.items()} == {"a": 4, "b": 4}


def test_nothing_is_given_up_while_a_load_is_under_way(stuck):
    engine = stuck()
    loads, held = engine.worker, []

    def slow(scheduled):
        held.extend(scheduled.kv_connector_metadata.loads)
        loads.running = held[:] if len(engine.trace) == 20 else []
        scheduled.kv_connector_metadata.loads = []
        return loads(scheduled)

    engine.worker = slow
    engine.add("a", range(LOADED + 1), 12)
    engine.add("b", range(LOADED + 1), 12)
    for _ in range(18):
        engine.step()
    tables = [engine.scheduler.kv_cache_manager.get_block_ids(name) for name in "ab"]
    assert [len(ids) for (ids,) in tables] == [5, 5]
    engine.run(max_steps=60)
    assert all(len(tokens) == 12 for tokens in engine.outputs.values())


def test_a_step_that_preempts_is_no_standstill(stuck):
    """vLLM lets nobody in during such a step; in the next one the loaded request can run."""
    engine = stuck()
    connector = engine.scheduler.connector
    connector.asked.add("a")
    engine.add("a", range(BLOCK_SIZE * 5 - 3), 12)
    engine.add("b", range(LOADED + 1), 12)
    engine.run(max_steps=60)
    first = next(tokens["b"] for tokens in engine.trace if "b" in tokens)
    assert any(request_ids == {} for request_ids in engine.trace)
    assert first == 1
