from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from npu_copy import InsufficientHostMemory, check_host_memory
from npu_copy.host_memory import host_limits

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root directory of a machine with 64 GiB available and no other limit."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/status").write_text("VmLck:\t    1024 kB\nCapEff:\t0000000000000000\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_enough_of_everything(machine: Path) -> None:
    check_host_memory(64 * GIB, root=machine)


def test_too_little_free_memory(machine: Path) -> None:
    with pytest.raises(InsufficientHostMemory, match=r"MemAvailable\): 64.00 GiB free, 136.00 GiB short; lower the"):
        check_host_memory(200 * GIB, root=machine)


def test_a_cgroup_limit_counts_what_is_used_but_not_what_can_be_reclaimed(machine: Path) -> None:
    write(machine / "sys/fs/cgroup", memory__max=8 * GIB, memory__current=5 * GIB)
    write(machine / "sys/fs/cgroup", memory__stat=f"anon {4 * GIB}\ninactive_file {GIB}")
    check_host_memory(4 * GIB, root=machine)
    with pytest.raises(InsufficientHostMemory, match=r"cgroup.*: 4.00 GiB free, 0.50 GiB short; raise .*--memory"):
        check_host_memory(4 * GIB + GIB // 2, root=machine)


def test_a_limit_of_a_parent_cgroup_counts(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/pod/container\n")
    write(machine / "sys/fs/cgroup/pod/container", memory__max="max", memory__current=GIB)
    write(machine / "sys/fs/cgroup/pod", memory__max=2 * GIB, memory__current=GIB)
    with pytest.raises(InsufficientHostMemory, match=r"cgroup memory limit \(.*/pod\): 1.00 GiB free"):
        check_host_memory(2 * GIB, root=machine)


def test_version_1_cgroups(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    files = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": 2 * GIB}
    write(machine / "sys/fs/cgroup/memory/box", **{k.replace(".", "__"): v for k, v in files.items()})
    write(machine / "sys/fs/cgroup/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=0)
    with pytest.raises(InsufficientHostMemory, match=r"memory/box\): 1.00 GiB free"):
        check_host_memory(2 * GIB, root=machine)
    check_host_memory(GIB, root=machine)


def test_shared_memory_counts_only_when_asked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    )
    check_host_memory(16 * GIB, root=machine)
    with pytest.raises(InsufficientHostMemory, match=r"/dev/shm: 0.06 GiB free, 15.94 GiB short;.*--shm-size=1024g"):
        check_host_memory(16 * GIB, shm=True, root=machine)


def test_the_memlock_limit_counts_only_for_memory_this_process_locks(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    check_host_memory(GIB, root=machine)
    check_host_memory(7 << 20, pinned=True, root=machine)  # 1 MiB is locked already
    with pytest.raises(InsufficientHostMemory, match=r"RLIMIT_MEMLOCK.*--ulimit memlock=-1"):
        check_host_memory(8 << 20, pinned=True, root=machine)
    (machine / "proc/self/status").write_text("VmLck:\t 0 kB\nCapEff:\t0000000000004000\n")
    check_host_memory(GIB, pinned=True, root=machine)  # CAP_IPC_LOCK lifts the limit


def test_all_that_is_short_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine / "sys/fs/cgroup", memory__max=GIB, memory__current=0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    with pytest.raises(InsufficientHostMemory) as caught:
        check_host_memory(100 * GIB, pinned=True, root=machine)
    assert all(word in str(caught.value) for word in ("MemAvailable", "cgroup", "MEMLOCK"))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        check_host_memory(-1)


def test_this_machine_can_be_read() -> None:
    limits = dict(host_limits())
    assert limits["host RAM (MemAvailable)"] > 0
    with pytest.raises(InsufficientHostMemory):
        check_host_memory(1 << 60)
