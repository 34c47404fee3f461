"""The memory of a rank notices wrong bytes, and accesses that only an order nobody guarantees keeps apart."""

import numpy as np
import pytest

from pd_integration.sim.errors import Violation
from pd_integration.sim.memory import POISON, BlockCopy, RankMemory, rows_and_columns

BLOCK = 4


@pytest.fixture
def memory():
    return RankMemory(0, num_blocks=8, block_size=BLOCK, slots=2)


def digests(count):
    return np.arange(1, count + 1, dtype=np.int64) * 1001


def place(start, end):
    return rows_and_columns([3, 5], start, end, BLOCK)


def store(memory, *blocks):
    copy = BlockCopy(True, memory.next_order(), frozenset(blocks), frozenset(blocks))
    memory.begin_copy(copy)
    return copy


def load(memory, *blocks):
    copy = BlockCopy(False, memory.next_order(), frozenset(blocks), frozenset(blocks))
    memory.begin_copy(copy)
    return copy


def test_what_was_written_reads_right(memory):
    memory.write(0, 0, range(2), *place(0, 6), digests(6))
    assert memory.read(0, 0, 1, *place(0, 6), digests(6), "a forward")


@pytest.mark.parametrize("change", ["group", "layer", "position"])
def test_bytes_of_another_place_are_wrong(memory, change):
    memory.write(0, 0, [0], *place(0, 6), digests(6))
    memory.write(0, 1 if change == "group" else 0, [1], *place(0, 6), digests(6))
    group, slot, start = 0, 1, 0
    expected = digests(6)
    if change == "layer":
        memory.move(1, place(0, 6), place(0, 6))
        memory.tensors[1].copy_(memory.tensors[0])
    if change == "position":
        expected = np.roll(expected, 1)
    with pytest.raises(Violation, match="wrong KV"):
        memory.read(0, group, slot, *place(start, 6), expected, "a forward")


def test_kv_of_older_weights_is_called_stale(memory):
    memory.write(0, 0, range(2), *place(0, 6), digests(6))
    with pytest.raises(Violation, match="stale KV"):
        memory.read(1, 0, 0, *place(0, 6), digests(6), "a forward")


def test_the_remains_of_a_failed_load_are_no_violation_but_bad(memory):
    memory.write(0, 0, range(2), *place(0, 6), digests(6))
    memory.write(0, 0, range(2), *place(4, 6), POISON)
    assert not memory.read(0, 0, 0, *place(0, 6), digests(6), "a forward")


def test_the_null_block_is_for_nobody(memory):
    memory.check_null_block()
    memory.tensors[0][0, 0] = 1
    with pytest.raises(Violation, match="null block"):
        memory.check_null_block()


def test_a_later_write_must_wait_for_the_end_of_a_store(memory):
    copy = store(memory, 3)
    order = memory.next_order()
    with pytest.raises(Violation, match="device block race"):
        memory.compute_access(order, frozenset(), frozenset([3]), "a forward")
    memory.compute_access(order, frozenset([3]), frozenset([4]), "a reader is no harm")
    memory.end_copy(copy)
    memory.compute_access(order, frozenset(), frozenset([3]), "a forward")


def test_a_store_must_wait_for_earlier_writes(memory):
    order = memory.next_order()
    copy = store(memory, 3)
    memory.compute_access(order, frozenset(), frozenset([3]), "the forward it waits for")
    memory.start_copy(copy)
    with pytest.raises(Violation, match="device block race"):
        memory.compute_access(order, frozenset(), frozenset([3]), "a forward it should have waited for")


def test_nobody_reads_what_a_load_is_still_writing(memory):
    load(memory, 3)
    with pytest.raises(Violation, match="device block race"):
        memory.compute_access(memory.next_order(), frozenset([3]), frozenset(), "a forward")


def test_a_load_into_stored_blocks_must_wait_for_the_store(memory):
    first = store(memory, 3)
    second = BlockCopy(False, memory.next_order(), frozenset([3]), frozenset([6]))
    memory.begin_copy(second)
    memory.start_copy(first)
    with pytest.raises(Violation, match="device block race"):
        memory.start_copy(second)


def test_another_machine_may_not_write_what_a_store_still_reads(memory):
    copy = store(memory, 3)
    with pytest.raises(Violation, match="outside write race"):
        memory.begin_outside_write([2, 3])
    memory.end_copy(copy)
    write = memory.begin_outside_write([2, 3])
    with pytest.raises(Violation, match="another machine"):
        memory.compute_access(memory.next_order(), frozenset([2]), frozenset(), "a forward")
    memory.end_outside_write(write)
    assert not memory.busy
    assert memory.outside_after_store == 1


def test_host_blocks_belong_to_one_copy_until_it_ends(memory):
    store(memory, 3)
    with pytest.raises(Violation, match="host block race"):
        memory.begin_copy(BlockCopy(False, memory.next_order(), frozenset([6]), frozenset([3])))
