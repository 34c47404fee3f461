"""Worker sides of the connector over real bytes, one process for all ranks.

The "model" writes for every scheduled token a value made from the request, the position and the rank, and reads all
values that the request attends to: a byte that was lost, kept from another request or restored to the wrong place is an
AssertionError in the step that reads it.
"""

import zlib

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import ModelRunnerOutput

from recompute_scheduler.testing import BLOCK_SIZE, loads_before_forward, worker_output

WIDTH = 8


class ByteRanks:
    """The `worker` of a ScriptedEngine; set `scheduler` to the engine's."""

    def __init__(self, vllm_config, kv_cache_config, ranks=1, layers=2):
        shape = (kv_cache_config.num_blocks, 2, BLOCK_SIZE, WIDTH)
        self.caches = [
            {f"layer.{n}": torch.full(shape, -1, dtype=torch.int32) for n in range(layers)} for _ in range(ranks)
        ]
        self.connectors = [
            KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
            for _ in range(ranks)
        ]
        for connector, cache in zip(self.connectors, self.caches, strict=True):
            connector.register_kv_caches(cache)
        self.scheduler = None
        self.reads = 0
        self._ranks = range(ranks)
        self._aggregator = KVOutputAggregator(ranks)

    def __call__(self, scheduled):
        outputs = [ModelRunnerOutput([], {}, kv_connector_output=self._step(r, scheduled)) for r in self._ranks]
        return self._aggregator.aggregate(outputs).kv_connector_output

    def _step(self, rank, scheduled):
        connector, cache = self.connectors[rank], self.caches[rank]
        meta = scheduled.kv_connector_metadata
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        if loads_before_forward(scheduled):
            connector.start_load_kv(None)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self._forward(rank, cache, request_id, count)
        if not loads_before_forward(scheduled):
            connector.start_load_kv(None)
        connector.wait_for_save()
        output = worker_output(connector, scheduled.finished_req_ids)
        connector.clear_connector_metadata()
        return output

    def _forward(self, rank, cache, request_id, count):
        # vLLM has moved num_computed_tokens on by this step's tokens.
        end = self.scheduler.requests[request_id].num_computed_tokens
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        for layer, tensor in enumerate(cache.values()):
            for position in range(end):
                slot = tensor[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
                value = (zlib.crc32(request_id.encode()) + 977 * position + 13 * layer + rank) & 0x7FFFFFFF
                if position >= end - count:
                    slot.fill_(value)
                else:
                    assert (slot == value).all(), f"rank {rank}: {request_id} reads wrong KV at position {position}"
                    self.reads += 1

    def shutdown(self):
        for connector in self.connectors:
            connector.shutdown()
