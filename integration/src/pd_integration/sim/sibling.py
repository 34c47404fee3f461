"""A scripted P/D connector beside ours in MultiConnector, as hostile as Mooncake may be.

Once for each request that was prefilled elsewhere it claims the whole prompt; the KV arrives from outside, written by
another machine in no order with this rank's streams, from the moment the load is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from block_mapper import GroupKind
from pd_integration._vllm import (
    FAILED_LOADS_BY_BLOCK,
    FREES_BLOCKS_IN_FLIGHT,
    HITS_MAY_BE_TAKEN,
    KVConnectorTransferResults,
)
from pd_integration.sim.clock import Clock
from pd_integration.sim.forward import Layers, first_attended
from pd_integration.sim.memory import POISON, RankMemory, rows_and_columns
from pd_integration.sim.tokens import Text

REMOTE = {"do_remote_prefill": True}


@dataclass
class Outside:
    """The world that sibling connectors see; the simulation sets `memory` and `settle` before it makes each rank's
    connector.

    fails: asked once a load and rank. by_block: report failures by block id instead of by request id; vLLM takes that
    from models with one group only, and gets it right only when that is full attention. undecided: asked at each
    query, whether the answer is "not known yet".
    """

    clock: Clock
    random: Random
    texts: dict[str, Text]
    layers: Layers
    seconds: float
    epoch: Callable[[], int]
    fails: Callable[[], bool]
    by_block: bool
    undecided: Callable[[], bool]
    claimed: Callable[[str], None]
    memory: RankMemory | None = None
    settle: Callable[[], None] | None = None


outside: Outside | None = None


@dataclass
class RemoteLoad:
    """Positions start..end of a request, into its block tables."""

    request_id: str
    tables: list[list[int]]
    start: int
    end: int


@dataclass
class ScriptedMetadata(KVConnectorMetadata):
    loads: list[RemoteLoad] = field(default_factory=list)


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert outside is not None, "only a simulation makes this connector"
        self._outside = outside
        self._memory = outside.memory
        self._settle = outside.settle
        self._planned: list[RemoteLoad] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        if self._outside.undecided():
            return None, False
        if HITS_MAY_BE_TAKEN and num_computed_tokens and len(self._outside.layers.groups) > 1:
            return 0, False
        count = self._claim(request) - num_computed_tokens
        return max(0, count), count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return
        request.kv_transfer_params = {"do_remote_prefill": False}
        if num_external_tokens:
            end = self._claim(request)
            tables = [list(ids) for ids in blocks.get_block_ids()]
            self._planned.append(RemoteLoad(request.request_id, tables, end - num_external_tokens, end))
            self._outside.claimed(request.request_id)

    def _claim(self, request: Request) -> int:
        """The prompt; without its last token where only full attention can go back by the one token to compute here:
        a state cannot, and vLLM frees what falls out of a window after the whole prompt."""
        full = all(group.kind is GroupKind.FULL for group in self._outside.layers.groups)
        return len(request.prompt_token_ids or ()) - (not full)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ScriptedMetadata:
        planned, self._planned = self._planned, []
        return ScriptedMetadata(planned)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ScriptedMetadata)
        for load in metadata.loads:
            self._start(load)

    def _start(self, load: RemoteLoad) -> None:
        assert self._memory is not None
        assert self._settle is not None
        memory, clock = self._memory, self._outside.clock
        if FREES_BLOCKS_IN_FLIGHT:
            # Nothing else keeps the other machine from writing what a step in flight writes; that race is vLLM's own.
            self._settle()
        parts = [part for g in range(len(load.tables)) for part in self._parts(load, g)]
        blocks = {int(block) for _, rows, _, _ in parts for block in rows}
        write = memory.begin_outside_write(blocks)
        failed = self._outside.fails()
        epoch, seconds = (
            self._outside.epoch(),
            self._outside.seconds * self._outside.random.choice((0.1, 0.5, 1.0, 3.0)),
        )
        targets = self._outside.layers.total

        def deliver(some: list[tuple[int, Any, Any, Any]]) -> None:
            for group, rows, columns, digests in some:
                memory.write(epoch, group, range(targets), rows, columns, POISON if failed else digests)

        def finish() -> None:
            memory.end_outside_write(write)
            self._finished.add(load.request_id)
            if failed and (self._outside.by_block or FAILED_LOADS_BY_BLOCK):
                self._failed_blocks |= blocks
            elif failed:
                self._failed.add(load.request_id)

        half = len(parts) // 2
        deliver(parts[:half])
        clock.after(seconds / 2, lambda: deliver(parts[half:]))
        clock.after(seconds, finish)

    def _parts(self, load: RemoteLoad, g: int) -> list[tuple[int, Any, Any, Any]]:
        """(group, block ids, offsets, digests) for every piece of the load that has a block."""
        text, group = self._outside.texts[load.request_id], self._outside.layers.groups[g]
        assert self._memory is not None
        if group.kind is GroupKind.RECURRENT:
            page = self._memory.block_size
            block = load.tables[g][(load.end - 1) // group.block_size]
            return [(g, np.full(page, block), np.arange(page), np.repeat(text.digests[load.end - 1 : load.end], page))]
        start = max(load.start, first_attended(group, load.end - 1) // group.block_size * group.block_size)
        rows, columns = rows_and_columns(load.tables[g], start, load.end, group.block_size)
        there = rows != 0
        rows, columns, digests = rows[there], columns[there], text.digests[start : load.end][there]
        return [(g, rows[i : i + 4], columns[i : i + 4], digests[i : i + 4]) for i in range(0, len(rows), 4)]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished, self._finished = self._finished, set()
        return None, finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(
            finished_recving=self.get_finished(finished_req_ids)[1] or set(), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks
