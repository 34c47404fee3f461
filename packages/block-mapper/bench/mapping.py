"""Time to map and coalesce block tables. Prints the best and the median of interleaved repetitions, in milliseconds.

python bench/mapping.py
"""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from block_mapper import GroupKind, HostPool, KVGroup, SavedRequests, coalesce

FULL = KVGroup(GroupKind.FULL, 16)
REPEATS = 30


def fragmented(pool: HostPool) -> HostPool:
    """Every other block of the pool is taken: no two free blocks touch."""
    blocks = pool.allocate(pool.num_blocks)
    pool.free(blocks[::2])
    return pool


def crowded(saved: SavedRequests, requests: int) -> SavedRequests:
    """This many other saved requests of 16 blocks."""
    for i in range(requests):
        saved.save(f"other {i}", [range(1, 17)], 256, job=0)
    if requests:
        saved.report(0)
    return saved


def measure(saved: SavedRequests, table: list[int], hashes: list[bytes] | None) -> dict[str, float]:
    tokens = len(table) * FULL.block_size
    clock = [time.perf_counter()]

    def lap() -> None:
        clock.append(time.perf_counter())

    stores = saved.save("request", [table], tokens, job=1, hashes=None if hashes is None else [hashes])
    lap()
    coalesce(stores)
    lap()
    saved.report(1)
    lap()
    loads = saved.load("request", [table], tokens, job=2)
    lap()
    coalesce(loads)
    lap()
    saved.report(2)
    lap()
    steps = ("save", "coalesce", "stored", "load", "coalesce", "restored")
    times: dict[str, float] = defaultdict(float)
    for step, start, end in zip(steps, clock, clock[1:], strict=False):
        times[step] = max(times[step], (end - start) * 1e3)
    return times


def main() -> None:
    rng = np.random.default_rng(0)
    scattered = rng.permutation(100_000)[:10_000] + 1
    hashes = [i.to_bytes(32, "big") for i in range(10_000)]
    alone = SavedRequests(HostPool(20_000), [FULL])
    cases = {
        "1 000 blocks": (alone, scattered[:1_000].tolist(), None),
        "10 000 blocks": (alone, scattered.tolist(), None),
        "10 000 in one piece": (alone, list(range(1, 10_001)), None),
        "10 000, pool of 200 000": (SavedRequests(HostPool(200_000), [FULL]), scattered.tolist(), None),
        "10 000, 2 000 others saved": (
            crowded(SavedRequests(HostPool(50_000), [FULL]), 2_000),
            scattered.tolist(),
            None,
        ),
        "10 000, pool in crumbs": (SavedRequests(fragmented(HostPool(20_000)), [FULL]), scattered.tolist(), None),
        "10 000, prefixes shared": (
            SavedRequests(HostPool(20_000), [FULL], share_prefixes=True),
            scattered.tolist(),
            hashes,
        ),
    }
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in cases}
    for _ in range(REPEATS):
        for name, (saved, table, case_hashes) in cases.items():
            for step, elapsed in measure(saved, table, case_hashes).items():
                times[name][step].append(elapsed)
    steps = list(times["10 000 blocks"])
    print(f"{'best (median) ms':30}" + "".join(f"{step:>16}" for step in steps))
    for name, of_case in times.items():
        row = "".join(f"{min(of_case[step]):8.2f} ({np.median(of_case[step]):5.2f})" for step in steps)
        print(f"{name:30}{row}")


if __name__ == "__main__":
    main()
