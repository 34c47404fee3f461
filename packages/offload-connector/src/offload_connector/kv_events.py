"""KV cache events for host blocks that requests share by prefix, as vLLM publishes them for its own blocks."""

from collections.abc import Hashable, Sequence

from block_mapper import HostPool, JobDone, KVGroup
from offload_connector._vllm import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent, external_block_hash

Key = tuple[int, Hashable]
"""(KV cache group, prefix hash), as block-mapper's prefix index has it."""


class HostBlockEvents:
    """What became findable on the host, and what is there no more.

    A block is announced when its store is done on every rank, not before: until then nobody could load it.
    """

    def __init__(self, groups: Sequence[KVGroup], pool: HostPool) -> None:
        self._groups = groups
        self._pool = pool
        self._storing: dict[Key, int] = {}
        self._announced: set[Key] = set()
        self._events: list[KVCacheEvent] = []

    def saved(self, job: int) -> None:
        """A request was saved; what it added to the prefix index is stored by `job`."""
        self._take_in(job)

    def done(self, done: JobDone) -> None:
        """All ranks have reported a job."""
        self._take_in(None)
        stored = [key for key, job in self._storing.items() if job == done.job]
        for key in stored:
            del self._storing[key]
        for index, group in enumerate(self._groups):
            hashes = [_hash(key) for key in stored if key[0] == index]
            if hashes:
                self._events.append(
                    BlockStored(
                        block_hashes=hashes,
                        parent_block_hash=None,
                        token_ids=[],
                        block_size=group.block_size,
                        lora_id=None,
                        medium=MEDIUM_CPU,
                        lora_name=None,
                        group_idx=index,
                    )
                )
        self._announced.update(stored)

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        self._take_in(None)
        events, self._events = self._events, []
        return events

    def _take_in(self, job: int | None) -> None:
        for key, published in self._pool.take_changes():
            if published:
                assert job is not None, "a block was published outside a save"
                self._storing[key] = job
            elif self._storing.pop(key, None) is None:
                self._announced.remove(key)
                self._events.append(BlockRemoved(block_hashes=[_hash(key)], medium=MEDIUM_CPU, group_idx=key[0]))


def _hash(key: Key) -> object:
    # A draft layer's key has the token after the block as well; the event names the block.
    return external_block_hash(key[1][0] if isinstance(key[1], tuple) else key[1])
