"""Where a recurrent state lies after steps with drafts, by hand."""

from pd_integration.sim.recurrent import StateMove, StateTracker


def test_without_drafts_the_state_moves_from_block_to_block():
    tracker = StateTracker(4)
    assert tracker.move("a", 0, 3, 0, 0) == StateMove(0, None, 0, 3, 0, 0, None)
    assert tracker.move("a", 3, 4, 0, 0) == StateMove(3, (0, 0), 0, 4, 0, 0, (0, 0))
    assert tracker.move("a", 4, 5, 0, 0) == StateMove(4, (0, 0), 1, 5, 0, 0, None)


def test_the_next_step_starts_from_the_slot_of_the_last_right_draft():
    tracker = StateTracker(100)
    tracker.move("a", 0, 10, 0, 0)
    assert tracker.move("a", 10, 14, 3, 2) == StateMove(10, (0, 0), 0, 11, 3, 2, None)
    assert tracker.move("a", 13, 17, 3, 0).source == (0, 2)
    assert tracker.move("a", 14, 18, 3, 3).source == (0, 0)


def test_a_state_at_the_end_of_a_block_is_moved_there():
    tracker = StateTracker(4)
    tracker.move("a", 0, 2, 0, 0)
    # Positions 2..6, the last three drafts: states after 3, 4, 5 tokens are right, and 4 ends block 0.
    move = tracker.move("a", 2, 6, 3, 2)
    assert (move.current, move.first, move.final) == (1, 3, (1, 0))
    assert tracker.move("a", 5, 9, 3, 0).source == (1, 2)


def test_a_final_move_within_the_first_slot_leaves_no_offset():
    tracker = StateTracker(4)
    tracker.move("a", 0, 1, 0, 0)
    move = tracker.move("a", 1, 4, 2, 2)
    assert (move.current, move.final) == (0, (2, 0))
    assert tracker.move("a", 4, 5, 0, 0).source == (0, 0)


def test_a_resumed_request_starts_from_the_block_of_its_last_token():
    tracker = StateTracker(4)
    tracker.move("a", 0, 4, 3, 1)
    tracker.forget("a")
    assert tracker.move("a", 6, 7, 0, 0).source == (1, 0)
