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
from npu_copy.host_memory import host_limits

GIB = 1 << 30
BUDGET_S = 5.0
PIECES = (8 << 10, 64 << 10, 256 << 10, 1 << 20)


def best_device() -> torch.device:
    """The first NPU or CUDA device, else the CPU."""
    if importlib.util.find_spec("torch_npu"):
        npu = importlib.import_module("torch_npu").npu
        if npu.is_available():
            return torch.device("npu", npu.current_device())
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
    device = torch.device(args.device) if args.device else best_device()
    print_machine(device)
    if args.mib:
        try:
            print_bandwidth(device, args.mib << 20)
        except InsufficientHostMemory as error:
            raise SystemExit(f"no bandwidth table: {error}") from error


if __name__ == "__main__":
    main()
