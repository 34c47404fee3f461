"""The life of one request, end to end."""

from block_mapper import GroupKind, HostPool, JobDone, KVGroup, SavedRequests, State


def test_one_life() -> None:
    pool = HostPool(16)
    saved = SavedRequests(pool, [KVGroup(GroupKind.SLIDING_WINDOW, 4, window=8)], world_size=2)
    assert saved.save("a", [[0, 0, 20, 21, 22]], num_tokens=15, job=0).tolist() == [[20, 1], [21, 2]]
    assert saved.report(0) is None
    assert saved.restorable_tokens("a") is None
    assert saved.report(0) == JobDone(0, restorable=("a",))
    assert saved.restorable_tokens("a") == 15
    assert saved.load("a", [[0, 0, 31, 30, 35]], 15, job=1).tolist() == [[1, 31], [2, 30]]
    assert saved.report(1, count=2) == JobDone(1, restored=("a",))
    assert saved.state("a") is State.GONE
    assert pool.usage().used == 0
