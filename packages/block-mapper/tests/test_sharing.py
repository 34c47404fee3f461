"""Prefix sharing: full blocks with the same hash are stored once, and never given out before they are written."""

import pytest

from block_mapper import GroupKind, HostPool, HostPoolFull, JobDone, KVGroup, SavedRequests, State

FULL = KVGroup(GroupKind.FULL, 4)
PREFIX = [b"p0", b"p1"]


@pytest.fixture
def saved() -> SavedRequests:
    return SavedRequests(HostPool(12), [FULL], share_prefixes=True)


def copied(
    saved: SavedRequests, req_id: str, table: list[int], tokens: int, job: int, hashes: list[bytes | None]
) -> list[int]:
    return saved.save(req_id, [table], tokens, job, hashes=[hashes])[:, 0].tolist()


def test_shared_blocks_are_stored_and_counted_once(saved: SavedRequests) -> None:
    assert copied(saved, "a", [10, 11, 12], 11, 0, PREFIX) == [10, 11, 12]
    saved.report(0)
    assert copied(saved, "b", [20, 21, 22], 10, 1, PREFIX) == [22]
    assert saved.pool.usage().used == 4
    a, b = saved.host_tables("a")[0], saved.host_tables("b")[0]
    assert a[:2].tolist() == b[:2].tolist()
    assert a[2] != b[2]
    saved.check_integrity()


def test_sharing_is_off_unless_asked_for() -> None:
    saved = SavedRequests(HostPool(12), [FULL])
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    assert copied(saved, "b", [20, 21], 8, 0, PREFIX) == [20, 21]


def test_partial_block_and_unhashed_blocks_are_never_shared(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 7, 0, PREFIX)
    assert copied(saved, "b", [20, 21], 7, 0, PREFIX) == [21]
    assert copied(saved, "c", [30, 31], 8, 0, [None, b"p1"]) == [30, 31]
    assert copied(saved, "d", [40, 41], 8, 0, [b"p0", b"p1"]) == []


def test_request_that_shares_a_block_under_store_waits_for_that_store(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    assert copied(saved, "b", [20, 21, 22], 9, 1, PREFIX) == [22]
    assert saved.report(1) == JobDone(1)
    assert saved.restorable_tokens("b") is None
    assert saved.report(0) == JobDone(0, restorable=("a", "b"))
    assert saved.restorable_tokens("b") == 9


def test_failed_store_drops_those_who_share_it_and_is_not_found_again(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    copied(saved, "b", [20, 21, 22], 9, 1, PREFIX)
    assert saved.report(0, failed=True) == JobDone(0, failed=("a", "b"))
    assert saved.report(1) == JobDone(1)
    assert saved.pool.usage().free == 12
    assert copied(saved, "c", [30, 31], 8, 2, PREFIX) == [30, 31]
    saved.check_integrity()


def test_shared_block_outlives_its_first_owner(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    copied(saved, "b", [20, 21], 8, 0, PREFIX)
    saved.discard("a")
    assert saved.report(0) == JobDone(0, restorable=("b",))
    assert saved.pool.usage().used == 2
    assert saved.load("b", [[30, 31]], 8, 1).tolist() == [[1, 30], [2, 31]]
    saved.report(1)
    assert (saved.pool.usage().used, saved.pool.usage().cached) == (0, 2)


def test_blocks_of_a_restored_request_stay_to_be_shared(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11, 12], 11, 0, PREFIX)
    saved.report(0)
    saved.load("a", [[20, 21, 22]], 11, 1)
    saved.report(1)
    assert (saved.pool.usage().cached, saved.pool.usage().free) == (2, 10)
    assert copied(saved, "b", [30, 31], 8, 2, PREFIX) == []
    assert saved.pool.usage().cached == 0


def test_block_of_a_discarded_request_is_cached_only_once_written(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    saved.discard("a")
    assert (saved.pool.usage().used, saved.pool.usage().cached) == (2, 0)
    saved.report(0)
    assert (saved.pool.usage().used, saved.pool.usage().cached) == (0, 2)


def test_cached_blocks_give_way_but_not_those_the_request_itself_shares(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11, 12, 13], 16, 0, [*PREFIX, b"p2", b"p3"])
    saved.report(0)
    saved.discard("a")
    assert copied(saved, "b", list(range(20, 32)), 48, 1, PREFIX) == list(range(22, 32))
    assert saved.pool.usage().cached == 0
    assert saved.pool.usage().used == 12
    saved.check_integrity()


def test_full_pool_changes_nothing_for_shared_blocks(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    saved.report(0)
    saved.discard("a")
    before = saved.pool.usage()
    with pytest.raises(HostPoolFull) as caught:
        copied(saved, "b", list(range(20, 34)), 56, 1, PREFIX)
    assert (caught.value.needed, caught.value.free) == (12, 10)
    after = saved.pool.usage()
    assert (after.used, after.cached, after.free) == (before.used, before.cached, before.free)
    assert saved.state("b") is State.GONE
    saved.check_integrity()


def test_same_hash_in_another_group_is_another_block() -> None:
    saved = SavedRequests(HostPool(12), [FULL, FULL], share_prefixes=True)
    saved.save("a", [[10], [11]], 4, 0, hashes=[[b"p0"], [b"p0"]])
    one, two = saved.host_tables("a")
    assert one[0] != two[0]
    assert saved.save("b", [[20], [21]], 4, 0, hashes=[[b"p0"], [None]])[:, 0].tolist() == [21]


def test_recurrent_state_is_never_shared() -> None:
    saved = SavedRequests(HostPool(12), [KVGroup(GroupKind.RECURRENT, 4)], share_prefixes=True)
    copied(saved, "a", [0, 11], 8, 0, PREFIX)
    assert copied(saved, "b", [0, 21], 8, 0, PREFIX) == [21]


def test_reset_forgets_shared_prefixes(saved: SavedRequests) -> None:
    copied(saved, "a", [10, 11], 8, 0, PREFIX)
    saved.report(0)
    saved.discard("a")
    copied(saved, "b", [12, 13], 8, 1, [b"q0", b"q1"])
    saved.reset()
    assert (saved.pool.usage().cached, saved.pool.usage().used) == (0, 2)
    assert copied(saved, "c", [20, 21], 8, 2, PREFIX) == [20, 21]
    assert copied(saved, "d", [22, 23], 8, 2, [b"q0", b"q1"]) == [22, 23]
    saved.report(1)
    saved.check_integrity()


def test_hash_that_does_not_cover_its_prefix_is_refused(saved: SavedRequests) -> None:
    with pytest.raises(ValueError, match="group 0 has the same hash twice"):
        copied(saved, "a", [10, 11], 8, 0, [b"x", b"x"])
    with pytest.raises(ValueError, match="2 hash lists for 1 groups"):
        saved.save("a", [[10, 11]], 8, 0, hashes=[[], []])
    assert saved.open_jobs() == ()
    assert saved.pool.usage().free == 12
