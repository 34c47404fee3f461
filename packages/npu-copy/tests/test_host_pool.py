from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_copy import HostPool, InsufficientHostMemory, _numa, find_regions, host_pool

PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCKS = 5


def regions_of(*block_bytes: int) -> list:
    kv = {str(i): torch.zeros(BLOCKS, n, dtype=torch.uint8) for i, n in enumerate(block_bytes)}
    return find_regions(kv, BLOCKS, block_dim=0)


def resident_bytes(addresses: list[int]) -> int:
    """Resident bytes of the mappings that hold ``addresses``, from the kernel's own account."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            counted = any(start <= address < end for address in addresses)
        elif counted and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("block_bytes", [(100_000, 3_000_000), (4096,), (131 * 1024,) * 9])
def test_host_memory_taken_is_the_budget_within_a_block_a_region(block_bytes: tuple[int, ...]) -> None:
    regions = regions_of(*block_bytes)
    num_blocks = (96 << 20) // sum(block_bytes)  # not a power of two: 96 MiB
    before = process_bytes()
    pool = HostPool.allocate(regions, num_blocks)
    taken = process_bytes() - before
    assert pool.nbytes == num_blocks * sum(block_bytes)
    slack = sum(max(n, PAGE) for n in block_bytes)
    assert pool.nbytes - slack <= resident_bytes(pool.addresses) <= pool.nbytes + slack
    # The whole process: page tables and thread stacks are all that may come on top.
    assert abs(taken - pool.nbytes) <= slack + (2 << 20)
    pool.close()
    assert process_bytes() - before < 8 << 20


def test_host_blocks_lie_one_after_the_other() -> None:
    regions = regions_of(24, 4096)
    pool = HostPool.allocate(regions, 7, threads=1)
    for i, region in enumerate(regions):
        view = pool.block_view(i)
        assert view.shape == (7, region.block_bytes)
        assert [row.data_ptr() for row in view] == [pool.addresses[i] + b * region.block_bytes for b in range(7)]
        assert not view.any()
    pool.close()
    pool.close()


def test_huge_pages_are_asked_for() -> None:
    pool = HostPool.allocate(regions_of(4 << 20), 4, threads=1)
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= pool.addresses[0] < end
        elif inside and first == "VmFlags:":
            flags = line
    assert " hg" in flags
    pool.close()


def test_pages_can_be_placed_on_a_node() -> None:
    node = _numa.nodes()[0]
    pool = HostPool.allocate(regions_of(4096), 9, numa_node=node, threads=1)
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        policies = [
            line.split()[1] for line in maps.read_text().splitlines() if int(line.split()[0], 16) == pool.addresses[0]
        ]
        assert policies == [f"prefer:{node}"]
    pool.close()


def test_a_node_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match="NUMA node 1000"):
        HostPool.allocate(regions_of(4096), 9, numa_node=1000, threads=1)


def test_the_node_of_a_device_is_read_from_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2):
        (tmp_path / f"sys/devices/system/node/node{i}").mkdir(parents=True)
    slot = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    slot.mkdir(parents=True)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda = torch.device("cuda", 0)
    (slot / "numa_node").write_text("1\n")
    assert _numa.node_of(cuda, tmp_path) == 1
    (slot / "numa_node").write_text("-1\n")
    assert _numa.node_of(cuda, tmp_path) is None
    assert _numa.node_of(torch.device("cpu"), tmp_path) is None


def test_a_budget_the_host_cannot_hold_is_refused_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "buffer_type", lambda *_: lambda *_: pytest.fail("allocated"))
    with pytest.raises(InsufficientHostMemory, match="cannot allocate"):
        HostPool.allocate(regions_of(1 << 20), 1 << 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 1}, "at least 2.*got 1"),
        ({"num_blocks": 5, "pin": True}, "'cpu' backend has no pinned memory"),
        ({"num_blocks": 5, "threads": 0}, "threads must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostPool.allocate(regions_of(64), **arguments)
    with pytest.raises(ValueError, match="regions is empty"):
        HostPool.allocate([], 5)


def test_memory_is_given_back_when_no_helper_is_at_it_any_more() -> None:
    """A copy whose caller was interrupted leaves its helper behind."""
    pool = HostPool.allocate(regions_of(64), 6, threads=2)
    both, leave = threading.Barrier(2), threading.Event()

    def work(_: int) -> None:
        both.wait(10)
        if threading.current_thread() is not threading.main_thread():
            leave.wait(10)

    pool.team.run(2, work, wait=False)
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(0.05)
    assert not pool.closed
    leave.set()
    closing.join(10)
    assert pool.closed
