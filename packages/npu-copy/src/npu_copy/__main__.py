"""Report what this machine offers for copying blocks, and how fast it copies: ``python -m npu_copy``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import platform
import time
from pathlib import Path

import numpy as np
import torch

from npu_copy import CopyEngine, Direction, HostPool, InsufficientHostMemory, __version__, _numa, find_regions
from npu_copy.host_memory import check_host_memory, host_limits

GIB = 1 << 30
BUDGET_S = 5.0
PIECES = (8 << 10, 64 << 10, 256 << 10, 1 << 20)


def devices() -> list[torch.device]:
    """What this machine can copy from, the fastest kind first."""
    found = []
    if importlib.util.find_spec("torch_npu"):
        npu = importlib.import_module("torch_npu").npu
        found += [torch.device("npu", i) for i in range(npu.device_count())] if npu.is_available() else []
    found += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [*found, torch.device("cpu")]


def choose(name: str | None) -> torch.device:
    """The device of this name, or the first there is.

    Raises:
        ValueError: this machine has none of that name.
    """
    here = devices()
    if name is None:
        return here[0]
    wanted = f"{name}:0" if name in ("npu", "cuda") else name
    for device in here:
        if str(device) == wanted:
            return device
    raise ValueError(f"--device {name}: this machine has {', '.join(map(str, here))}")


def print_machine(device: torch.device) -> None:
    """Versions, device, memory limits."""
    print(
        f"npu-copy {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    print(f"device           {device} {name}".rstrip())
    node = _numa.node_of(device)
    print(f"NUMA nodes       {len(_numa.nodes())}" + (f", the device at node {node}" if node is not None else ""))
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(f"huge pages       {huge_pages.read_text().strip() if huge_pages.exists() else 'none'}")
    print("free host memory")
    for what, free in host_limits():
        print(f"  {free / GIB:10.2f} GiB  {what}")


def print_bandwidth(device: torch.device, bytes_a_side: int) -> None:
    """GB/s of stores and loads of random blocks, by piece size."""
    print(f"copies of {bytes_a_side >> 20} MiB in random blocks, median GB/s")
    for piece in PIECES:
        blocks = bytes_a_side // piece + 1
        cache = torch.zeros(blocks, piece, dtype=torch.int8, device=device)
        regions = find_regions({"cache": cache}, blocks, block_dim=0)
        pool = HostPool.allocate(regions, blocks)
        engine = CopyEngine(regions, pool)
        if piece == PIECES[0]:
            print(f"  backend {engine.backend}, {'pinned' if pool.pinned else 'pageable'} host memory")
            print(f"  {'piece':>9} {'store':>7} {'load':>7}")
        rng = np.random.default_rng(0)
        pairs = np.stack([rng.permutation(np.arange(1, blocks)) for _ in range(2)], axis=1)
        speed: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        end, job = time.monotonic() + BUDGET_S / len(PIECES), 0
        while not speed[Direction.LOAD] or time.monotonic() < end:
            for direction in Direction:
                start = time.perf_counter()
                engine.submit(job, pairs, direction, block_compute=True)
                engine.wait(job, 60)
                speed[direction].append((blocks - 1) * piece / (time.perf_counter() - start) / 1e9)
                (result,) = engine.poll()
                if result.error is not None:
                    raise result.error
                job += 1
        store, load = (float(np.median(speed[direction])) for direction in (Direction.STORE, Direction.LOAD))
        print(f"  {piece >> 10:5} KiB {store:7.1f} {load:7.1f}", flush=True)
        engine.close()
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m npu_copy", description=__doc__.splitlines()[0])
    parser.add_argument("--device", help='such as "cpu", "cuda:1" or "npu:0"; default: the first accelerator, else cpu')
    parser.add_argument("--mib", type=int, default=256, help="MiB a side for the bandwidth table; 0: no table")
    args = parser.parse_args()
    if args.mib < 0:
        parser.error(f"--mib must not be negative, got {args.mib}")
    logging.basicConfig(format="%(message)s")
    try:
        device = choose(args.device)
    except ValueError as error:
        parser.error(str(error))
    print_machine(device)
    if args.mib:
        try:
            check_host_memory((args.mib << 20) * (2 if device.type == "cpu" else 1))
            print_bandwidth(device, args.mib << 20)
        except InsufficientHostMemory as error:
            raise SystemExit(f"no bandwidth table: {error}") from error


if __name__ == "__main__":
    main()
