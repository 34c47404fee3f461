"""Which positions a group needs, derived again token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive import visible

from block_mapper import GroupKind, KVGroup, UnsupportedGroup

sizes = st.integers(1, 12)
windowed_groups = st.builds(
    KVGroup, st.sampled_from([GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL]), sizes, window=st.integers(1, 20)
)
attention_groups = windowed_groups | st.builds(KVGroup, st.just(GroupKind.FULL), sizes)


@given(attention_groups, st.integers(1, 80))
def test_needed_positions_are_those_of_the_visible_tokens(group: KVGroup, num_tokens: int) -> None:
    positions = {token // group.block_size for token in visible(group, num_tokens)}
    if num_tokens % group.block_size:
        positions.add(num_tokens // group.block_size)  # partly filled: the next token is written into it
    assert list(group.needed(num_tokens)) == sorted(positions)


@given(sizes, st.integers(1, 80))
def test_recurrent_group_needs_the_block_of_the_last_computed_token(block_size: int, num_tokens: int) -> None:
    group = KVGroup(GroupKind.RECURRENT, block_size)
    assert list(group.needed(num_tokens)) == [(num_tokens - 1) // block_size]


@given(windowed_groups, st.integers(1, 80), st.data())
def test_fewest_tokens_is_the_least_that_the_kept_blocks_serve(
    group: KVGroup, num_tokens: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, group.needed(num_tokens).start))

    def serves(n: int) -> bool:
        return all(token // group.block_size >= first for token in visible(group, n))

    fewest = group.fewest_tokens(first, num_tokens)
    assert fewest <= num_tokens
    assert all(serves(n) for n in range(fewest, num_tokens + 1))
    # Where tokens to come see no earlier token at all, fewer could do; a block further back must still be out of reach.
    assert fewest == 1 or group.needed(fewest - 1).start < first


def test_full_attention_can_resume_anywhere_and_a_state_nowhere_else() -> None:
    assert KVGroup(GroupKind.FULL, 4).fewest_tokens(0, 30) == 1
    assert KVGroup(GroupKind.RECURRENT, 4).fewest_tokens(7, 30) == 30


def test_kinds_are_accepted_by_value() -> None:
    assert KVGroup("sliding_window", 4, window=8).kind is GroupKind.SLIDING_WINDOW  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cross_attention", "'cross_attention' cannot be saved: its blocks hold the encoder's output"),
        ("circular_buffer", "'circular_buffer' cannot be saved: known kinds: full, sliding_window"),
        (None, "None cannot be saved: known kinds"),
    ],
)
def test_other_kinds_are_refused_with_a_reason(kind: object, reason: str) -> None:
    with pytest.raises(UnsupportedGroup, match=reason):
        KVGroup(kind, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": GroupKind.FULL, "block_size": 0}, "block_size is 0"),
        ({"kind": GroupKind.SLIDING_WINDOW, "block_size": 4}, "window is None: a sliding_window group needs"),
        ({"kind": GroupKind.CHUNKED_LOCAL, "block_size": 4, "window": 0}, "window is 0: a chunked_local group needs"),
        ({"kind": GroupKind.FULL, "block_size": 4, "window": 8}, "window is 8: a full group has none"),
        ({"kind": GroupKind.FULL, "block_size": 4, "speculative_blocks": 1}, "speculative_blocks is 1"),
        ({"kind": GroupKind.RECURRENT, "block_size": 4, "speculative_blocks": -1}, "speculative_blocks is -1"),
    ],
)
def test_wrong_sizes_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVGroup(**arguments)  # type: ignore[arg-type]
