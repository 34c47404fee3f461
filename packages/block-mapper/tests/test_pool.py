"""Host blocks: never handed out twice, never lost, shared ones kept while there is room."""

import numpy as np
import pytest

from block_mapper import HostPool, HostPoolFull, PoolUsage
from block_mapper.runs import Int64Array


def ids(*blocks: int) -> Int64Array:
    return np.array(blocks, np.int64)


def published(pool: HostPool, *keys: str) -> list[int]:
    """One cached block per key, freed in the order of the keys."""
    blocks = pool.allocate(len(keys))
    pool.publish(keys, blocks)
    for block in blocks:
        pool.free(block[None])
    return [int(block) for block in blocks]


def test_null_block_is_never_handed_out() -> None:
    pool = HostPool(3)
    assert pool.allocate(3).tolist() == [1, 2, 3]
    pool.check_integrity()


def test_allocation_is_all_or_nothing() -> None:
    pool = HostPool(4)
    pool.allocate(3)
    with pytest.raises(HostPoolFull, match="2 host blocks needed, 1 free") as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert pool.usage() == PoolUsage(total=4, used=3, cached=0, free=1, high_water=3)
    assert len(pool.allocate(1)) == 1


def test_neighbours_are_preferred() -> None:
    pool = HostPool(10)
    pool.allocate(10)
    pool.free(ids(1, 3, 5, 6, 7, 9))
    assert pool.allocate(3).tolist() == [5, 6, 7]


def test_block_returns_with_its_last_holder() -> None:
    pool = HostPool(2)
    block = pool.allocate(1)
    pool.retain(block)
    pool.free(block)
    assert pool.usage().used == 1
    pool.free(block)
    assert pool.usage() == PoolUsage(total=2, used=0, cached=0, free=2, high_water=1)
    pool.check_integrity()


def test_high_water_mark_stays() -> None:
    pool = HostPool(8)
    blocks = pool.allocate(5)
    pool.free(blocks)
    pool.allocate(2)
    assert pool.usage().high_water == 5


def test_freeing_twice_is_an_error_and_changes_nothing() -> None:
    pool = HostPool(2)
    blocks = pool.allocate(2)
    pool.free(blocks[:1])
    with pytest.raises(ValueError, match=r"\[1\] are not in use: freed twice"):
        pool.free(blocks)
    pool.check_integrity()
    assert pool.usage().used == 1


def test_free_block_cannot_be_retained() -> None:
    with pytest.raises(ValueError, match="host block 1 is not in use"):
        HostPool(2).retain(ids(1))


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_pool_without_a_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}.*at least one block"):
        HostPool(num_blocks)


def test_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="n is -1"):
        HostPool(2).allocate(-1)


def test_published_block_without_holder_is_cached_and_can_be_shared_again() -> None:
    pool = HostPool(4)
    (block,) = published(pool, "prefix")
    assert pool.usage() == PoolUsage(total=4, used=0, cached=1, free=3, high_water=1)
    assert pool.lookup(["prefix"]) == [block]
    pool.retain(ids(block))
    assert pool.usage() == PoolUsage(total=4, used=1, cached=0, free=3, high_water=1)
    pool.check_integrity()


def test_least_recently_freed_block_is_evicted_first() -> None:
    pool = HostPool(4)
    a, _, c = published(pool, "a", "b", "c")
    pool.retain(ids(a))
    pool.free(ids(a))
    pool.allocate(2)
    assert pool.lookup("abc").tolist() == [a, 0, c]
    pool.check_integrity()


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = HostPool(3)
    blocks = pool.allocate(3)
    pool.publish("abc", blocks)
    pool.free(blocks)
    pool.allocate(1)
    assert pool.lookup("abc").tolist() == [1, 2, 0]


def test_cached_blocks_count_as_room_and_used_ones_do_not() -> None:
    pool = HostPool(4)
    a, _ = published(pool, "a", "b")
    pool.retain(ids(a))
    with pytest.raises(HostPoolFull) as caught:
        pool.allocate(4)
    assert caught.value.free == 3
    assert pool.lookup("b") != 0, "a failed allocation must not evict"
    pool.allocate(3)
    assert pool.lookup("b") == 0
    pool.check_integrity()


def test_unpublished_cached_block_becomes_free() -> None:
    pool = HostPool(4)
    published(pool, "a", "b")
    used = pool.allocate(1)
    pool.publish("c", used)
    pool.unpublish()
    assert pool.lookup("abc").tolist() == [0, 0, 0]
    assert pool.usage() == PoolUsage(total=4, used=1, cached=0, free=3, high_water=2)
    pool.free(used)
    assert pool.usage().free == 4
    pool.check_integrity()


def test_one_key_one_block() -> None:
    pool = HostPool(4)
    pool.allocate(2)
    pool.publish("a", ids(1))
    for key, block in [("a", 2), ("b", 1), ("c", 4)]:
        with pytest.raises(ValueError, match=rf"host blocks \[{block}\] cannot be published"):
            pool.publish(key, ids(block))
    assert pool.lookup("abc").tolist() == [1, 0, 0]
    pool.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.refs.__setitem__(1, 0),
        lambda pool: pool.refs.__setitem__(3, 1),
        lambda pool: pool._free.put(ids(2)),
        lambda pool: pool._cached.update({4: None}),
        lambda pool: pool._key_of.clear(),
        lambda pool: pool.refs.__setitem__(0, 1),
        lambda pool: pool._free.put(ids(0)),
    ],
)
def test_integrity_check_sees_damage(damage: object) -> None:
    pool = HostPool(6)
    pool.allocate(2)
    pool.publish("a", ids(1))
    pool.check_integrity()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_changes_of_the_prefix_index_are_told_once_and_in_order():
    pool = HostPool(2, log_changes=True)
    ids = pool.allocate(2)
    pool.publish(["a", "b"], ids)
    assert pool.take_changes() == [("a", True), ("b", True)]
    assert pool.take_changes() == []
    pool.free(ids)
    pool.allocate(1)
    assert pool.take_changes() == [("b", False)]
    pool.unpublish()
    assert pool.take_changes() == [("a", False)]


def test_without_a_log_there_is_nothing_to_take():
    with pytest.raises(ValueError, match="log_changes=True"):
        HostPool(2).take_changes()


def test_a_fraction_of_a_block_is_refused() -> None:
    with pytest.raises(TypeError, match=r"num_blocks is 2\.5"):
        HostPool(2.5)  # type: ignore[arg-type]
