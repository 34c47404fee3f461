"""Copy speed of real KV cache shapes, as ratios to a plain large memcpy of the same bytes in the same run.

Every round times each arm once, one after the other, so that a noisy machine is noisy for all of them; a ratio is the
median over the rounds of the two arms' times in one round.

    python bench/bench_copy.py                  all shapes, up to 4 GiB a side, to reports/bench-copy.json
    python bench/bench_copy.py --gib 1 --shape small-8k
    python bench/bench_copy.py --device cuda

On an accelerator "memcpy" is its driver's copy of whole regions.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from npu_copy import CopyEngine, Direction, HostPool, find_regions
from npu_copy._threads import Team
from npu_copy.host_memory import host_limits
from npu_copy.plan import Planner

GIB = 1 << 30
# A sample shorter than this is repeated: the clock and the wake-up of threads would drown it.
MIN_SAMPLE_S = 0.01
COLD_BYTES = 512 << 20


# Written, not zeros: pages never written are all the same one page, and reading them costs nothing.
ones = functools.partial(torch.ones, dtype=torch.bfloat16)


def layers(count: int, *shape: int) -> Callable[[int, str], dict]:
    return lambda n, device: {f"layer.{i}": ones(n, *shape, device=device) for i in range(count)}


def keys_and_values(count: int, *shape: int) -> Callable[[int, str], dict]:
    def make(n: int, device: str) -> dict:
        return {f"layer.{i}": tuple(ones(n, *shape, device=device) for _ in "KV") for i in range(count)}

    return make


def packed(count: int, *shape: int) -> Callable[[int, str], dict]:
    def make(n: int, device: str) -> dict:
        blocks = ones(n, count, *shape, device=device)
        return {f"layer.{i}": blocks[:, i] for i in range(count)}

    return make


SHAPES = {
    "mla-61": (layers(61, 128, 576), 61 * 128 * 576 * 2),
    "gqa-32": (keys_and_values(32, 128, 8, 128), 64 * 128 * 8 * 128 * 2),
    "packed-32": (packed(32, 128, 256), 32 * 128 * 256 * 2),
    "page-64k": (layers(32, 128, 256), 32 * 64 << 10),
    "small-8k": (layers(32, 16, 256), 32 * 8 << 10),
}


def per_layer_loop(kv: dict, host: dict, pairs: np.ndarray, direction: Direction) -> None:
    """What a first version does: one ``copy_`` a block and tensor."""
    device_column = 0 if direction is Direction.STORE else 1
    for name, value in kv.items():
        tensors = value if isinstance(value, tuple) else (value,)
        for tensor, mirror in zip(tensors, host[name], strict=True):
            for pair in pairs.tolist():
                device, copy = tensor[pair[device_column]], mirror[pair[1 - device_column]]
                if direction is Direction.STORE:
                    copy.copy_(device, non_blocking=True)
                else:
                    device.copy_(copy, non_blocking=True)


def host_mirror(kv: dict, pool: HostPool) -> dict:
    """The pool's memory as one tensor a registered tensor, for the loop; where bytes lie does not matter to it."""
    flat, used, views = [pool.block_view(r).view(-1) for r in range(len(pool.block_bytes))], 0, {}
    for name, value in kv.items():
        parts = []
        for tensor in value if isinstance(value, tuple) else (value,):
            size = pool.num_blocks * tensor[0].numel() * tensor.element_size()
            if len(flat) == 1:
                start, used, source = used, used + size, flat[0]
            else:
                start, source = 0, flat[used]
                used += 1
            parts.append(source[start : start + size].view(tensor.dtype).view(pool.num_blocks, *tensor.shape[1:]))
        views[name] = parts
    return views


def large_memcpy(ends: list[tuple[torch.Tensor, torch.Tensor]], team: Team) -> Callable[[], None]:
    """libc's memcpy of whole (destination, source) regions, shared out in at least 8 slices a thread."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    parts = max(1, -(-8 * team.num_threads // len(ends)))
    cuts = []
    for destination, source in ends:
        bounds = [destination.nbytes * i // parts for i in range(parts + 1)]
        for start, end in itertools.pairwise(bounds):
            cuts.append((destination.data_ptr() + start, source.data_ptr() + start, end - start))
    return lambda: team.run(len(cuts), lambda i: memcpy(*cuts[i]))


def large_copy(ends: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> None:
    """The driver's own copy of whole regions, pinned memory on one side."""
    for destination, source in ends:
        destination.copy_(source, non_blocking=True)
    synchronize(device)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(torch.device(device)).current_stream().synchronize()


def timed(arm: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        arm()
    return (time.perf_counter() - start) / repeats


def measure(arms: dict[str, Callable[[], None]], rounds: int, loop_rounds: int) -> dict[str, list[float]]:
    repeats = {}
    for name, arm in arms.items():
        first = timed(arm, 1)
        repeats[name] = max(1, int(MIN_SAMPLE_S / max(first, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds):
        for name, arm in arms.items():
            if not name.startswith("loop") or i < loop_rounds:
                times[name].append(timed(arm, repeats[name]))
    return times


def ratio(times: dict[str, list[float]], arm: str, to: str) -> float:
    return statistics.median(t / a for a, t in zip(times[arm], times[to], strict=False))


def bench_shape(name: str, args: argparse.Namespace, team: Team) -> list[dict]:
    make, block_bytes = SHAPES[name]
    most = int(args.gib * GIB) // block_bytes
    kv = make(most, args.device)
    regions = find_regions(kv, most, block_dim=0)
    pool = HostPool.allocate(regions, most, threads=args.threads)
    engine = CopyEngine(regions, pool)
    mirror = host_mirror(kv, pool)
    rng = np.random.default_rng(0)
    rows = []
    for count in sorted({min(16, most - 1), min(256, most - 1), most - 1}):
        for order in ("contiguous", "random"):
            pick = rng.permutation if order == "random" else np.asarray
            ids = np.stack([pick(np.arange(1, most)) for _ in range(2)], axis=1)
            # A job's blocks are not in the cache: go through several sets of them.
            sets = max(1, min(len(ids) // count, COLD_BYTES // (count * block_bytes)))
            pairs = [ids[i * count : (i + 1) * count] for i in range(sets)]
            row = {"shape": name, "piece_bytes": min(r.block_bytes for r in regions), "regions": len(regions)}
            row |= {"blocks": count, "ids": order, "bytes": count * block_bytes, "sets": sets}
            for direction in Direction:
                turn = itertools.count()

                def copy(direction=direction, turn=turn, pairs=pairs) -> None:
                    job = next(turn)
                    engine.submit(job, pairs[job % len(pairs)], direction, block_compute=True)
                    engine.wait(job, 60)
                    (result,) = engine.poll()
                    assert result.error is None

                def loop(direction=direction, turn=turn, pairs=pairs, mirror=mirror) -> None:
                    per_layer_loop(kv, mirror, pairs[next(turn) % len(pairs)], direction)
                    synchronize(args.device)

                plain_copies = []
                for i in range(sets):
                    blocks = slice(i * count, (i + 1) * count)
                    ends = [(pool.block_view(j)[blocks], r.block_view()[blocks]) for j, r in enumerate(regions)]
                    if direction is Direction.LOAD:
                        ends = [(device, host) for host, device in ends]
                    on_cpu = args.device == "cpu"
                    plain_copies.append(
                        large_memcpy(ends, team) if on_cpu else functools.partial(large_copy, ends, args.device)
                    )

                def plain(turn=turn, plain_copies=plain_copies) -> None:
                    plain_copies[next(turn) % len(plain_copies)]()

                arms = {"memcpy": plain, "engine": copy, "loop": loop}
                loop_rounds = min(args.rounds, 5 if row["bytes"] < GIB // 2 else 3)
                times = measure(arms, args.rounds, loop_rounds)
                row[direction.value] = {
                    "memcpy_gb_s": row["bytes"] / statistics.median(times["memcpy"]) / 1e9,
                    "engine_gb_s": row["bytes"] / statistics.median(times["engine"]) / 1e9,
                    "engine_to_memcpy": ratio(times, "engine", "memcpy"),
                    "engine_to_loop": ratio(times, "engine", "loop"),
                    "loop_rounds": loop_rounds,
                }
            s, ld = row["store"], row["load"]
            print(
                f"{name:10} {row['piece_bytes'] >> 10:5} KiB {count:6} blocks {order:10} "
                f"memcpy {s['memcpy_gb_s']:5.1f} {ld['memcpy_gb_s']:5.1f} GB/s   of memcpy: "
                f"store {s['engine_to_memcpy']:.2f} load {ld['engine_to_memcpy']:.2f}   "
                f"of the loop: store {s['engine_to_loop']:.1f} load {ld['engine_to_loop']:.1f}",
                flush=True,
            )
            rows.append(row)
    engine.close()
    del mirror, loop, plain, plain_copies, arms, ends  # views of the pool
    pool.close()
    return rows


def bench_submission(rounds: int) -> dict:
    """Milliseconds to check 4096 random pairs and build the copy descriptors of 122 regions, copying nothing."""
    blocks = 4097
    kv = {f"layer.{i}": (torch.empty(blocks, 64, dtype=torch.int8),) * 2 for i in range(61)}
    kv = {name: tuple(t.clone() for t in parts) for name, parts in kv.items()}
    regions = find_regions(kv, blocks)
    pool = HostPool.allocate(regions, blocks, threads=1)
    planner = Planner(regions, pool)
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.permutation(np.arange(1, blocks)) for _ in range(2)], axis=1)
    times = {
        "plan_ms": [timed(lambda: planner.plan(pairs, Direction.STORE), 1) * 1e3 for _ in range(rounds)],
        "descriptors_ms": [
            timed(lambda: planner.plan(pairs, Direction.STORE).pieces(), 1) * 1e3 for _ in range(rounds)
        ],
    }
    pool.close()
    result = {name: statistics.median(values) for name, values in times.items()}
    result |= {"blocks": blocks - 1, "regions": len(regions)}
    print(f"submission of {blocks - 1} blocks x {len(regions)} regions: {result['descriptors_ms']:.1f} ms")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help='such as "cpu", "cuda" or "npu"; default: cpu')
    parser.add_argument("--gib", type=float, help="GiB a side; default: 4, or a third of the free memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this shape; repeatable")
    parser.add_argument("--output", type=Path, default=Path("reports/bench-copy.json"))
    args = parser.parse_args()
    if args.device.startswith("npu"):
        importlib.import_module("torch_npu")
    args.gib = args.gib or min(4.0, min(free for _, free in host_limits() if free > GIB) / 3 / GIB)
    torch.set_num_threads(args.threads)
    team = Team(args.threads)
    submission = bench_submission(args.rounds)
    rows = [row for name in args.shape or SHAPES for row in bench_shape(name, args, team)]
    settings = {"threads": args.threads, "rounds": args.rounds, "gib_a_side": args.gib}
    settings |= {
        "device": args.device,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps({"settings": settings, "submission": submission, "copies": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
