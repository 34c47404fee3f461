"""One arm of one cell on a real Decode engine, in a process of its own.

The engine is vLLM's own, stepped here instead of by its API server: one process less that waits busily beside the one
that is measured. A request that ends lets the next one in, so `MAX_NUM_SEQS` are always there, running or waiting.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_integration import step_trace
from pd_integration.bench import peers
from pd_integration.bench.cells import BLOCK_TOKENS, BUDGET, HOST_BYTES, MAX_NUM_SEQS, Arm, Cell, Source
from pd_integration.bench.prefill import PrefillClient
from pd_integration.bench.process import Turns
from pd_integration.deployment import mooncake, offload, together

IDLE_S = 0.0005


@dataclass(frozen=True)
class Job:
    """What the process is to do; ``prefill`` is where the KV of the prompts comes from in a P/D cell."""

    model: Path
    cell: Cell
    arm: Arm
    trace: Path
    prefill: PrefillClient | None = None


@dataclass
class Outcome:
    """What one run gave: per request its token ids and the time (since the epoch) at which each came.

    ``metrics`` are vLLM's counters, gauges and sums of histograms by name; ``cpu_s`` is the processor time of the whole
    engine process. ``pauses`` are the times in which other arms ran. ``refused`` says why the arm cannot run on this
    platform.
    """

    tokens: list[list[int]] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    resent_tokens: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    refused: str | None = None


def transfer_config(cell: Cell, arm: Arm) -> dict[str, Any]:
    """Decode's --kv-transfer-config: the source of the prompts, and beside it what the arm adds."""
    if cell.source is Source.PREFILL:
        children = [mooncake("kv_consumer")]
    else:
        children = [{"kv_connector": "DecodeBenchConnector", "kv_role": "kv_consumer"}]
    if arm.offload is not None:
        children.append(offload(arm.offload))
    if arm.peer is not None:
        children.append(peers.config(arm.peer, HOST_BYTES))
    return together(*children)


def engine_arguments(job: Job) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs."""
    additional: dict[str, Any] = {}
    if job.arm.offload is not None:
        additional["recompute_scheduler_enable"] = True
    if job.arm.resend:
        additional["recompute_fallback"] = "resend"
    return {
        "model": str(job.model),
        "dtype": "float32",
        "max_model_len": job.cell.longest,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": job.cell.decode_blocks(job.arm),
        "enforce_eager": True,
        "enable_prefix_caching": job.arm.prefix_caching,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "kv_transfer_config": transfer_config(job.cell, job.arm),
        "additional_config": additional,
    }


def run(job: Job, turns: Turns) -> Outcome:
    """Start the engine and drive the cell's requests through it, in turn with the cell's other arms."""
    import torch
    from vllm import LLM

    torch.set_num_threads(job.cell.threads)
    if job.arm.free_copies:
        stub_copies()
    step_trace.install(str(job.trace))
    try:
        llm = LLM(**engine_arguments(job))
    except Exception as error:
        if job.arm.peer is None:
            raise
        return Outcome(refused=str(error).splitlines()[0])
    outcome = Driver(llm.llm_engine, job.cell, job.prefill, turns).run()
    for metric in llm.get_metrics():
        # A histogram has the sum of what it observed, the others a value.
        value = metric.value if hasattr(metric, "value") else getattr(metric, "sum", None)
        if value is not None:
            name = ":".join([metric.name, *(metric.labels[key] for key in ("reason",) if key in metric.labels)])
            outcome.metrics[name] = outcome.metrics.get(name, 0) + value
    return outcome


def stub_copies() -> None:
    """From now on this process's copies move nothing and take no time; all else about them stays."""
    from npu_copy.backends.cpu import CpuBackend

    CpuBackend._copy_blocks = lambda self, plan: None  # type: ignore[method-assign]


class Driver:
    """Adds the requests of ``cell`` to ``engine`` as others end, steps it, and notes every token."""

    def __init__(self, engine: Any, cell: Cell, prefill: PrefillClient | None, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns
        self._prefill = prefill
        self._pool = ThreadPoolExecutor(MAX_NUM_SEQS)
        self._prompts = cell.prompts()
        self._wanted = [output for _, output in cell.lengths()]
        self._at_prefill: dict[int, Future[dict[str, Any]]] = {}
        self._next = 0
        self._here: set[int] = set()
        count = cell.requests
        self._outcome = Outcome([[] for _ in range(count)], [[] for _ in range(count)], [0.0] * count)

    def run(self) -> Outcome:
        """Step to the end of the last request."""
        running = self._engine.engine_core.engine_core.scheduler.running
        self._turns.begin()
        began = time.process_time()
        while self._next < len(self._prompts) or self._here:
            while self._next < len(self._prompts) and len(self._here) < MAX_NUM_SEQS:
                self._send(self._next)
                self._next += 1
            self._take_from_prefill()
            self._turns.give()
            if not self._engine.has_unfinished_requests():
                time.sleep(IDLE_S)
                continue
            outputs = self._engine.step()
            self._note(outputs, time.time())
            if not outputs and not running:
                time.sleep(IDLE_S)  # as vLLM's engine core does when a step had nothing to run
        self._outcome.cpu_s = time.process_time() - began
        self._outcome.pauses = self._turns.pauses
        self._pool.shutdown()
        return self._outcome

    def _send(self, number: int) -> None:
        self._here.add(number)
        self._outcome.sent[number] = time.time()
        if self._prefill is None:
            self._add(number, None)
        else:
            self._at_prefill[number] = self._pool.submit(self._prefill.compute, self._so_far(number))

    def _so_far(self, number: int) -> list[int]:
        return self._prompts[number] + self._outcome.tokens[number]

    def _take_from_prefill(self) -> None:
        for number, future in list(self._at_prefill.items()):
            if future.done():
                del self._at_prefill[number]
                self._add(number, future.result())

    def _add(self, number: int, transfer: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        done = self._outcome.tokens[number]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._wanted[number] - len(done),
            ignore_eos=True,
            detokenize=False,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        self._engine.add_request(f"{number}.{len(done)}", {"prompt_token_ids": self._so_far(number)}, params)

    def _note(self, outputs: list[Any], now: float) -> None:
        for output in outputs:
            number, before = map(int, output.request_id.split("."))
            received, completion = self._outcome.tokens[number], output.outputs[0]
            new = completion.token_ids[len(received) - before :]
            received += new
            self._outcome.times[number] += [now] * len(new)
            if not output.finished:
                continue
            if completion.stop_reason == "recomputed" and self._prefill is not None:
                self._outcome.resent_tokens.append(len(self._so_far(number)))
                self._at_prefill[number] = self._pool.submit(self._prefill.compute, self._so_far(number))
            elif len(received) == self._wanted[number]:
                self._here.remove(number)
            else:
                reason = completion.finish_reason
                raise RuntimeError(f"request {number} ends after {len(received)} of {self._wanted[number]}: {reason}")
