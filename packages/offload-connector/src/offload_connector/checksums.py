"""`verify_restored_blocks`: proof, block by block, that what comes back is what went out."""

import zlib
from collections.abc import Sequence

import numpy as np

from npu_copy import Region


class BlockChecksums:
    """Checksums of host blocks, taken from the device before the store and compared on the device after the load.

    For debugging: every block is read once more in each direction, and the device is waited for.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._views = [region.block_view() for region in regions]
        self._of_host_block: dict[int, int] = {}

    def note_store(self, pairs: np.ndarray) -> None:
        """Remember the contents of the device blocks in `pairs`, int64 [n, 2] (device block, host block)."""
        for device, host in pairs.tolist():
            self._of_host_block[host] = self._checksum(device)

    def difference(self, pairs: np.ndarray) -> RuntimeError | None:
        """Compare the device blocks in `pairs`, int64 [n, 2] (host block, device block), with what was stored.

        Returns:
            An error that names the blocks that differ, or None.
        """
        wrong = [pair for pair in pairs.tolist() if self._checksum(pair[1]) != self._of_host_block[pair[0]]]
        return RuntimeError(f"blocks restored differ from those stored, (host, device): {wrong}") if wrong else None

    def _checksum(self, device_block: int) -> int:
        value = 0
        for view in self._views:
            value = zlib.crc32(view[device_block].cpu().numpy(), value)
        return value
