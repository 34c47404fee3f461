"""What is saved and restored, case by case. Names say what must hold."""

from itertools import chain

import numpy as np
import pytest

from block_mapper import GroupKind, HostPool, HostPoolFull, KVGroup, SavedRequests, State, UnsupportedGroup

FULL = KVGroup(GroupKind.FULL, 4)
SLIDING = KVGroup(GroupKind.SLIDING_WINDOW, 4, window=8)
CHUNKED = KVGroup(GroupKind.CHUNKED_LOCAL, 4, window=8)
RECURRENT = KVGroup(GroupKind.RECURRENT, 16)


def saved_requests(*groups: KVGroup, blocks: int = 32, world_size: int = 1) -> SavedRequests:
    return SavedRequests(HostPool(blocks), groups, world_size)


def store(saved: SavedRequests, req_id: str, tables: list[list[int]], num_tokens: int) -> dict[int, int]:
    """Save in a job of its own and finish it: host block by device block."""
    job = max(saved.open_jobs(), default=-1) + 1
    pairs = saved.save(req_id, tables, num_tokens, job)
    saved.report(job, saved._jobs.world_size)
    return dict(pairs.tolist())


def round_trip(saved: SavedRequests, old: list[list[int]], new: list[list[int]], num_tokens: int) -> dict[int, int]:
    """Save with the old tables and load with the new ones: old device block by new device block."""
    device_of = {h: d for d, h in store(saved, "a", old, num_tokens).items()}
    pairs = saved.load("a", new, num_tokens, job=99)
    saved.report(99, saved._jobs.world_size)
    return {d: device_of[h] for h, d in pairs.tolist()}


class TestPositions:
    def test_null_blocks_stay_in_place(self) -> None:
        saved = saved_requests(SLIDING)
        host = store(saved, "a", [[0, 0, 20, 21]], 15)
        assert saved.host_tables("a")[0].tolist() == [0, 0, host[20], host[21]]
        assert sorted(host) == [20, 21]

    def test_short_table_with_the_tail_of_the_window_is_aligned_to_its_positions(self) -> None:
        saved = saved_requests(SLIDING)
        host = store(saved, "a", [[20, 21]], 15)
        assert saved.host_tables("a")[0].tolist() == [0, 0, host[20], host[21]]
        assert saved.load("a", [[30, 31]], 15, job=1).tolist() == [[host[20], 30], [host[21], 31]]

    def test_short_table_that_lacks_its_end_is_not_taken_for_a_tail(self) -> None:
        with pytest.raises(UnsupportedGroup, match="sliding_window block table of 4 positions has no block at posit"):
            saved_requests(SLIDING).save("a", [[0, 0, 20, 21]], 17, job=0)

    def test_short_table_of_full_attention_is_refused(self) -> None:
        with pytest.raises(UnsupportedGroup, match="full block table of 2 positions has no block at position 2"):
            saved_requests(FULL).save("a", [[20, 21]], 9, job=0)

    def test_null_block_inside_the_window_is_refused(self) -> None:
        saved = saved_requests(SLIDING)
        with pytest.raises(UnsupportedGroup, match="no block at position 2, which the token after 15"):
            saved.save("a", [[0, 0, 0, 21]], 15, job=0)
        with pytest.raises(UnsupportedGroup, match="full block table of 2 positions has no block at position 0"):
            saved_requests(FULL).save("a", [[0, 21]], 8, job=0)
        assert saved.pool.usage().used == 0
        assert saved.open_jobs() == ()

    def test_chunked_attention_keeps_the_current_chunk(self) -> None:
        saved = saved_requests(CHUNKED)
        assert sorted(store(saved, "a", [[0, 0, 20, 21]], 13)) == [20, 21]

    def test_chunk_boundary_needs_no_block_at_all(self) -> None:
        saved = saved_requests(CHUNKED)
        assert store(saved, "a", [[0, 0]], 8) == {}
        assert saved.restorable_tokens("a") == 8
        assert saved.load("a", [[0, 0, 30]], 8, job=1).shape == (0, 2)

    def test_groups_with_other_block_sizes_keep_their_own_positions(self) -> None:
        saved = saved_requests(KVGroup(GroupKind.FULL, 4), KVGroup(GroupKind.FULL, 16), SLIDING)
        old = [[1, 2, 3, 4, 5], [6, 7], [0, 0, 8, 9, 10]]
        new = [[21, 22, 23, 24, 25], [26, 27], [0, 0, 28, 29, 30]]
        moved = round_trip(saved, old, new, 18)
        assert moved == {n: o for n, o in zip(chain(*new), chain(*old), strict=True) if n}

    def test_neighbours_on_the_device_are_neighbours_on_the_host(self) -> None:
        host = store(saved_requests(FULL), "a", [[9, 8, 7, 3]], 16)
        assert [host[d] for d in (3, 7, 8, 9)] == [1, 2, 3, 4]


class TestExactTokens:
    @pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (12, 3), (13, 4)])
    def test_n_blocks_n_blocks_and_one_token_and_one_token(self, num_tokens: int, blocks: int) -> None:
        saved = saved_requests(FULL)
        table, new = list(range(10, 16)), list(range(20, 26))
        assert round_trip(saved, [table], [new], num_tokens) == dict(zip(new[:blocks], table[:blocks], strict=True))
        assert saved.pool.usage().used == 0

    def test_partial_last_block_and_unhashed_decode_blocks_are_saved(self) -> None:
        saved = SavedRequests(HostPool(8), [FULL], share_prefixes=True)
        pairs = saved.save("a", [[10, 11, 12]], 11, job=0, hashes=[[b"prompt"]])
        assert sorted(pairs[:, 0].tolist()) == [10, 11, 12]

    def test_lookahead_blocks_are_neither_stored_nor_loaded(self) -> None:
        saved = saved_requests(FULL)
        assert round_trip(saved, [[10, 11, 12, 13]], [[20, 21, 22, 23, 24]], 7) == {20: 10, 21: 11}

    def test_output_that_ends_in_the_step_it_is_resumed_leaves_nothing(self) -> None:
        saved = saved_requests(FULL)
        store(saved, "a", [[10, 11]], 8)
        saved.load("a", [[20, 21]], 8, job=1)
        assert saved.discard("a")
        assert saved.pool.usage().used == 2, "the load still reads them"
        assert saved.report(1) is not None
        assert saved.pool.usage().used == 0

    def test_rejected_tokens_are_cut_off_at_the_load(self) -> None:
        saved = saved_requests(FULL)
        host = store(saved, "a", [[10, 11, 12]], 12)
        assert saved.restorable_tokens("a", at_most=6) == 6
        assert saved.load("a", [[20, 21, 22]], 6, job=1).tolist() == [[host[10], 20], [host[11], 21]]

    def test_blocks_that_the_prefix_cache_holds_are_not_loaded_again(self) -> None:
        saved = saved_requests(FULL)
        host = store(saved, "a", [[10, 11, 12]], 12)
        pairs = saved.load("a", [[20, 21, 22]], 11, job=1, device_tokens=6)
        assert pairs.tolist() == [[host[11], 21], [host[12], 22]]


class TestWindowEdges:
    def test_block_just_outside_the_window_that_was_never_stored_is_not_loaded(self) -> None:
        saved = saved_requests(FULL, SLIDING)
        old = [[10, 11, 12, 13, 14], [0, 0, 22, 23, 24]]
        new = [[30, 31, 32, 33, 34, 35], [0, 41, 42, 43, 44, 45]]
        moved = round_trip(saved, old, new, 17)
        assert {n: o for n, o in moved.items() if n >= 40} == {42: 22, 43: 23, 44: 24}

    @pytest.mark.parametrize(("num_tokens", "nulls"), [(10, 0), (11, 1), (12, 1), (14, 1), (15, 2), (18, 2), (19, 3)])
    def test_block_leaves_with_its_last_token_in_the_window(self, num_tokens: int, nulls: int) -> None:
        positions = -(-num_tokens // 4)
        table = [0] * nulls + list(range(20, 20 + positions - nulls))
        store(saved_requests(SLIDING), "a", [table], num_tokens)
        table[nulls] = 0
        with pytest.raises(UnsupportedGroup, match=f"position {nulls}"):
            saved_requests(SLIDING).save("a", [table], num_tokens, job=0)

    def test_mapping_is_that_of_the_moment_it_was_taken(self) -> None:
        saved = saved_requests(SLIDING)
        table = np.array([0, 0, 20, 21, 22])
        pairs = saved.save("a", [table], 17, job=0)
        table[2] = 0  # the window moves on and block 20 goes to another position
        table[4] = 20
        host = dict(pairs.tolist())
        assert saved.host_tables("a")[0].tolist() == [0, 0, host[20], host[21], host[22]]

    def test_window_cannot_be_restored_before_what_was_kept(self) -> None:
        saved = saved_requests(SLIDING)
        store(saved, "a", [[0, 0, 20, 21, 22]], 18)
        assert [saved.restorable_tokens("a", n) for n in (14, 15, 18, 30)] == [0, 15, 18, 18]
        with pytest.raises(ValueError, match="num_tokens is 14: request 'a' can be restored at 15 to 18 tokens"):
            saved.load("a", [[0, 30, 31, 32]], 14, job=1)
        assert saved.state("a") is State.RESTORABLE

    def test_stored_block_that_the_new_table_has_no_place_for_is_not_loaded(self) -> None:
        saved = saved_requests(SLIDING)
        host = store(saved, "a", [[0, 19, 20, 21]], 15)
        assert saved.load("a", [[0, 0, 30, 31]], 15, job=1).tolist() == [[host[20], 30], [host[21], 31]]

    def test_more_tokens_than_were_saved_cannot_be_restored(self) -> None:
        saved = saved_requests(FULL)
        store(saved, "a", [[10, 11]], 6)
        with pytest.raises(ValueError, match="num_tokens is 7: request 'a' can be restored at 1 to 6 tokens"):
            saved.load("a", [[20, 21]], 7, job=1)
        assert saved.state("a") is State.RESTORABLE

    def test_new_table_without_a_block_that_the_next_token_needs_is_refused(self) -> None:
        saved = saved_requests(FULL, SLIDING)
        store(saved, "a", [[10, 11, 12, 13], [0, 0, 22, 23]], 15)
        with pytest.raises(ValueError, match="full block table of 3 positions has no block at position 3"):
            saved.load("a", [[30, 31, 32], [0, 0, 42, 43]], 15, job=1)
        with pytest.raises(ValueError, match="sliding_window block table of 4 positions has no block at position 2"):
            saved.load("a", [[30, 31, 32, 33], [0, 0, 0, 43]], 15, job=1)
        assert saved.state("a") is State.RESTORABLE
        assert saved.open_jobs() == ()
        saved.check_integrity()


class TestEveryGroup:
    def test_recurrent_state_is_saved_and_restored_with_the_attention_groups(self) -> None:
        saved = saved_requests(FULL, RECURRENT, SLIDING)
        old = [[1, 2, 3, 4, 5], [0, 6], [0, 0, 7, 8, 9]]
        new = [[21, 22, 23, 24, 25], [0, 26], [0, 0, 27, 28, 29]]
        moved = round_trip(saved, old, new, 18)
        assert moved == {n: o for n, o in zip(chain(*new), chain(*old), strict=True) if n}

    def test_request_with_a_recurrent_group_resumes_at_the_saved_token_only(self) -> None:
        saved = saved_requests(FULL, RECURRENT)
        store(saved, "a", [[1, 2], [3]], 7)
        assert [saved.restorable_tokens("a", n) for n in (6, 7)] == [0, 7]

    def test_latent_attention_is_full_attention(self) -> None:
        assert round_trip(saved_requests(KVGroup(GroupKind.FULL, 64)), [[5, 6]], [[8, 9]], 100) == {8: 5, 9: 6}

    def test_table_of_a_group_is_missing(self) -> None:
        saved = saved_requests(FULL, RECURRENT)
        with pytest.raises(ValueError, match="1 block tables for 2 groups"):
            saved.save("a", [[1, 2]], 7, job=0)
        assert "a" not in saved


class TestRoom:
    def test_request_that_does_not_fit_changes_nothing(self) -> None:
        saved = saved_requests(FULL, SLIDING, blocks=5)
        store(saved, "a", [[1, 2], [3, 4]], 8)
        usage = saved.pool.usage()
        with pytest.raises(HostPoolFull) as caught:
            saved.save("b", [[5], [6]], 4, job=7)
        assert (caught.value.needed, caught.value.free) == (2, 1)
        assert saved.pool.usage() == usage
        assert (len(saved), "b" in saved, saved.open_jobs()) == (1, False, ())
        assert saved.restorable_tokens("a") == 8

    def test_cost_does_not_touch_other_requests(self) -> None:
        saved = saved_requests(FULL, blocks=64)
        for i in range(10):
            saved.save(f"r{i}", [[1 + 2 * i, 2 + 2 * i]], 8, job=0)
        assert saved.pool.usage().used == 20
        assert saved.report(0).restorable == tuple(f"r{i}" for i in range(10))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([3, -1], "negative block id -1"),
        ([1.5, 2.0], "flat sequence of block ids, got \\[1.5, 2.0\\]"),
        ([[1], [2]], "flat sequence of block ids"),
    ],
)
def test_malformed_tables_are_refused(table: list[int], message: str) -> None:
    saved = saved_requests(FULL)
    with pytest.raises(ValueError, match=message):
        saved.save("a", [table], 8, job=0)
    assert saved.open_jobs() == ()


def test_nothing_computed_is_nothing_to_save() -> None:
    with pytest.raises(ValueError, match="num_tokens is 0"):
        saved_requests(FULL).save("a", [[1]], 0, job=0)


@pytest.mark.parametrize("device_tokens", [-1, 8, 9])
def test_device_tokens_out_of_range_are_refused(device_tokens: int) -> None:
    saved = saved_requests(FULL)
    store(saved, "a", [[1, 2]], 8)
    with pytest.raises(ValueError, match=f"device_tokens is {device_tokens}"):
        saved.load("a", [[3, 4]], 8, job=1, device_tokens=device_tokens)
    assert saved.state("a") is State.RESTORABLE


def test_requests_without_groups_or_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="groups is empty"):
        SavedRequests(HostPool(1), [])
    with pytest.raises(ValueError, match="world_size is 0"):
        SavedRequests(HostPool(1), [FULL], world_size=0)
