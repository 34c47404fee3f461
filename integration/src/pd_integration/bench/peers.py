"""vLLM's own connectors that keep KV in host memory, as children of a MultiConnector on Decode.

Stock, neither runs on vLLM's CPU platform. `OffloadingConnector` takes the worker from outside (`spec_name`,
`spec_module_path`): `HostSpec` gives it one whose copies are plain ones of host memory, on one background thread.
`SimpleCPUOffloadConnector` has no such place.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

TIMEOUT_S = 60.0


def config(name: str, host_bytes: int) -> dict[str, Any]:
    """The child's part of --kv-transfer-config."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    if name == "OffloadingConnector":
        extra |= {"spec_name": HostSpec.__name__, "spec_module_path": __name__, "offload_prompt_only": False}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


class HostSpec(CPUOffloadingSpec):
    """vLLM's bookkeeping of host blocks, with a worker for a "device" that is host memory itself."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"HostSpec copies block by block, but a chunk has {self.blocks_per_chunk} blocks")
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_chunks)  # type: ignore[assignment]
        return self._worker  # type: ignore[return-value]


class HostWorker(OffloadingWorker):
    """Copies rows between vLLM's block tensors, int8 [blocks, bytes], and mirrors of them with ``rows`` rows."""

    def __init__(self, kv_caches: CanonicalKVCaches, rows: int) -> None:
        self._device = [canonical.tensor for canonical in kv_caches.tensors]
        self._host = [torch.empty((rows, tensor.shape[1]), dtype=torch.int8) for tensor in self._device]
        self._tensors = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._thread = ThreadPoolExecutor(1, "offloading copies")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, self._device, src_spec, self._host, dst_spec, src_spec.group_sizes)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, self._host, src_spec, self._device, dst_spec, dst_spec.group_sizes)

    def _submit(self, job_id: int, source: Any, at: Any, target: Any, to: Any, group_sizes: Any) -> bool:
        rows = torch.from_numpy(at.block_ids).long(), torch.from_numpy(to.block_ids).long()
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, source, target, rows, list(group_sizes))
        return True

    def _copy(self, job_id: int, source: Any, target: Any, rows: Any, group_sizes: list[int]) -> TransferResult:
        start, nbytes, begin = time.perf_counter(), 0, 0
        for size, tensors in zip(group_sizes, self._tensors, strict=True):
            taken = [ids[begin : begin + size] for ids in rows]
            begin += size
            for index in tensors:
                target[index][taken[1]] = source[index][taken[0]]
                nbytes += size * source[index].shape[1]
        return TransferResult(job_id, True, nbytes, time.perf_counter() - start)

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job).result() for job in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job] for job in job_ids if job in self._jobs], TIMEOUT_S)

    def shutdown(self) -> None:
        self._thread.shutdown()
