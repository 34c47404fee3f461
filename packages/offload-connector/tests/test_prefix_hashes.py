"""Which blocks may be shared, and that sharing restores the right bytes."""

from types import SimpleNamespace

from test_connector import assert_empty, counters, manager

from block_mapper import GroupKind, KVGroup
from offload_connector.prefix_hashes import PrefixHashes
from recompute_scheduler.testing import make_kv_cache_config


def hashes(groups, tokens, block_hashes, eagle=()):
    config = make_kv_cache_config(10, [SimpleNamespace(block_size=g.block_size) for g in groups])
    for index in eagle:
        config.kv_cache_groups[index].is_eagle_group = True
    request = SimpleNamespace(all_token_ids=tokens, block_hashes=block_hashes)
    return PrefixHashes(groups, config, hash_block_size=4).of(request)


def test_one_hash_a_full_block_and_group():
    groups = [KVGroup(GroupKind.FULL, 4), KVGroup(GroupKind.FULL, 8)]
    assert hashes(groups, list(range(18)), ["a", "b", "c", "d"]) == [["a", "b", "c", "d"], ["b", "d"]]


def test_a_draft_layers_block_depends_on_the_token_after_it():
    groups = [KVGroup(GroupKind.FULL, 4)]
    assert hashes(groups, list(range(9)), ["a", "b"], eagle=[0]) == [[("a", 4), ("b", 8)]]
    assert hashes(groups, list(range(8)), ["a", "b"], eagle=[0]) == [[("a", 4)]]


def test_a_group_whose_blocks_are_smaller_than_a_hash_shares_nothing():
    """vLLM hashes by the largest block where recurrent states are not kept at block boundaries."""
    groups = [KVGroup(GroupKind.FULL, 2), KVGroup(GroupKind.RECURRENT, 4)]
    assert hashes(groups, list(range(8)), ["a", "b"]) == [[], ["a", "b"]]


def run(make_engine, share, **options):
    engine = make_engine(14, options={"enable_offload_prefix_caching": share}, **options)
    for index in range(6):
        engine.add(f"r{index}", range(10, 60), 40)
    engine.run()
    return engine


def test_requests_with_the_same_prompt_share_host_blocks(make_engine, monkeypatch):
    """The bytes that ByteRanks writes depend on the request, so let them depend on the position alone here."""
    monkeypatch.setattr("byte_ranks.zlib.crc32", lambda name: 0)
    figures = {}
    for share in (False, True):
        engine = run(make_engine, share)
        assert all(len(tokens) == 40 for tokens in engine.outputs.values())
        manager(engine).check_integrity()
        figures[share] = counters(engine)
        if not share:
            assert_empty(engine)
    # How many are preempted depends on when the loads of others end.
    assert all(figures[share]["preempted_restored"] >= 2 for share in figures)
    per_victim = {share: made["blocks_stored"] / made["preempted_offloaded"] for share, made in figures.items()}
    assert per_victim[True] < per_victim[False]


def test_reset_empties_the_shared_blocks_too(make_engine, monkeypatch):
    monkeypatch.setattr("byte_ranks.zlib.crc32", lambda name: 0)
    engine = run(make_engine, share=True)
    assert manager(engine)._pool.usage().cached > 0
    manager(engine).reset()
    assert_empty(engine)


def test_events_tell_what_can_be_found_on_the_host(make_engine, monkeypatch):
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    monkeypatch.setattr("byte_ranks.zlib.crc32", lambda name: 0)
    told = []
    monkeypatch.setattr(
        "vllm.distributed.kv_events.NullEventPublisher.publish", lambda self, batch: told.extend(batch.events)
    )
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = run(make_engine, share=True, kv_events_config=events)
    stored = [
        h for event in told if isinstance(event, BlockStored) and event.medium == "CPU" for h in event.block_hashes
    ]
    gone = [
        h for event in told if isinstance(event, BlockRemoved) and event.medium == "CPU" for h in event.block_hashes
    ]
    assert len(stored) - len(gone) == manager(engine)._pool.usage().cached > 0
    assert set(gone) <= set(stored)
    manager(engine).reset()
    removed = manager(engine).take_events()
    assert {h for event in removed for h in event.block_hashes} == set(stored) - set(gone)


def test_without_sharing_there_are_no_events(make_engine):
    from vllm.config import KVEventsConfig

    engine = run(
        make_engine, share=False, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    )
    assert manager(engine).take_events() == []
