"""Move paged KV cache blocks between a device and pinned host memory at memory speed."""

from npu_copy.direction import Direction
from npu_copy.engine import CopyEngine, CopyResult
from npu_copy.host_memory import InsufficientHostMemory, check_host_memory
from npu_copy.host_pool import HostPool
from npu_copy.regions import Region, UnsupportedLayout, find_regions

__version__ = "0.1.0"

__all__ = [
    "CopyEngine",
    "CopyResult",
    "Direction",
    "HostPool",
    "InsufficientHostMemory",
    "Region",
    "UnsupportedLayout",
    "check_host_memory",
    "find_regions",
]
