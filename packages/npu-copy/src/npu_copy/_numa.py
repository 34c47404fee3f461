"""NUMA placement by the kernel's own interfaces; no libnuma."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import torch

_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1


def nodes(root: Path = Path("/")) -> list[int]:
    """The machine's NUMA nodes."""
    return sorted(int(p.name[4:]) for p in (root / "sys/devices/system/node").glob("node[0-9]*"))


def node_of(device: torch.device, root: Path = Path("/")) -> int | None:
    """The NUMA node a CUDA device is attached to, or None where the kernel does not say or there is only one."""
    if device.type != "cuda" or len(nodes(root)) < 2:
        return None
    p: Any = torch.cuda.get_device_properties(device)
    try:
        slot = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        node = int((root / "sys/bus/pci/devices" / slot / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, or a virtual machine that hides the slot
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> None:
    """Ask for the untouched pages of ``[address, address + nbytes)`` (page-aligned) to come from ``node``.

    Raises:
        OSError: the kernel refused, as it does for a node that does not exist.
        NotImplementedError: the processor's system call number is not known here.
    """
    if platform.machine() not in _SYS_MBIND:
        raise NotImplementedError(f"NUMA placement is not supported on {platform.machine()}")
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYS_MBIND[platform.machine()]
    # The kernel reads one bit less than it is told.
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_PREFERRED, mask, len(mask) * 64 + 1, 0)
    if libc.syscall(ctypes.c_long(number), *arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot place memory on NUMA node {node}: {os.strerror(error)}")
