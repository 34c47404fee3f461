"""vLLM's CPU worker for versions whose stand-in for a stream is too small for async scheduling.

Only workers import this module: it imports vLLM's.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class AsyncCPUWorker(CPUWorker):
    """Gives the stream for copies of outputs what it has since vLLM 0.28: on a CPU nothing is to be waited for."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.async_output_copy_stream.wait_stream = lambda stream: None
