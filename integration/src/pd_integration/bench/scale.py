"""How it scales, as a model: `python -m pd_integration.bench.scale`.

One Decode engine is vLLM's real scheduler with our mixin and the connector's real scheduler side; its device, host link
and time are a model with the inputs of `a3.toml`. Hours of traffic pass in minutes. All engines of a server are alike,
so one stands for all.

What a step takes: a constant, the time to read the weights and the KV of the running requests once, and its stores and
loads within the step, which the forward waits for. A load behind the step has the host link for itself and delays only
its own request. The KV of a new prompt is there at once: Prefill is not part of the model. A recurrent state counts as
further tokens of KV.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tomllib
import torch
from rich.console import Console
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from offload_connector.connector import RecomputeCPUOffloadConnector
from offload_connector.metadata import CopyJob, OffloadMetadata, OffloadWorkerMetadata
from pd_integration.bench import record
from pd_integration.bench.figures import percentile, ratio
from pd_integration.bench.tables import budget_rows
from pd_integration.sim.clock import Clock
from recompute_scheduler import RecomputeScheduler
from recompute_scheduler.testing import ScriptedEngine, make_config, make_kv_cache_config

INPUTS = Path(__file__).parent / "a3.toml"
GB = 1e9
BUDGETS_GB = (1, 2, 4, 8, 16, 32, 64)
FALLBACK_SHARE = 0.01


class PromptsArrive(RecomputeCPUOffloadConnector):
    """The connector, which also says once of each new request that the KV of its prompt is there, as from Prefill."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.num_preemptions == 0:
            return request.num_tokens - 1 - num_computed_tokens, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


@dataclass(frozen=True)
class Setup:
    """One model on the machine, per engine and card.

    Attributes:
        blocks: device blocks for KV.
        block_bytes: of one block on one card.
        state_tokens: what a recurrent state takes, in tokens of KV.
        requests: in this engine at once.
    """

    name: str
    blocks: int
    block_tokens: int
    block_bytes: float
    state_tokens: int
    weight_bytes: float
    requests: int
    max_num_seqs: int
    machine: dict[str, Any]
    traffic: dict[str, Any]

    @classmethod
    def of(cls, inputs: dict[str, Any], model: dict[str, Any]) -> Setup:
        """Work out the sizes from the inputs."""
        machine, tokens = inputs["machine"], inputs["engine"]["block_tokens"]
        room = machine["hbm_bytes"] * machine["memory_utilization"] - model["weight_bytes_per_card"]
        block_bytes = tokens * model["kv_bytes_per_token"]
        if room < block_bytes:
            raise ValueError(f"{model['name']}: {room:.0f} bytes of HBM are left for KV, less than a block")
        engines = machine["cards"] // model["cards_per_engine"]
        return cls(
            model["name"],
            int(room // block_bytes),
            tokens,
            block_bytes,
            int(model["state_bytes_per_request"] / model["kv_bytes_per_token"]),
            model["weight_bytes_per_card"],
            inputs["traffic"]["requests"] // engines,
            inputs["engine"]["max_num_seqs"],
            machine,
            inputs["traffic"],
        )

    def step_seconds(self, kv_tokens: int) -> float:
        """A step without copies in which requests of ``kv_tokens`` tokens in all run."""
        read = self.weight_bytes + kv_tokens / self.block_tokens * self.block_bytes
        return self.machine["step_overhead_s"] + read / self.machine["hbm_bytes_per_s"]

    def copy_seconds(self, blocks: int) -> float:
        """``blocks`` over the host link, one direction."""
        return blocks * self.block_bytes / self.machine["host_link_bytes_per_s"]

    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Least and most tokens of a prompt, the recurrent state counted, and of an output."""
        least, most = self.traffic["prompt_tokens"]
        return (least + self.state_tokens, most + self.state_tokens), tuple(self.traffic["output_tokens"])

    def lengths(self, draw: random.Random) -> tuple[int, int]:
        """(prompt, output) of the next request."""
        prompt, output = self.spans()
        return draw.randint(*prompt), draw.randint(*output)


@dataclass
class Preempted:
    """One preemption: when, blocks of the request, blocks on the host before it, and seconds until the next token."""

    time: float
    blocks: int
    host_before: int
    kept: bool
    resumed_after: float | None = None


@dataclass
class Run:
    """What hours of traffic came to; bytes are per card."""

    seconds: float = 0.0
    output_tokens: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    link_busy_s: float = 0.0
    stalled_s: float = 0.0
    preempted: list[Preempted] = field(default_factory=list)


class Workers:
    """Stand for the cards: carry the jobs out in virtual time."""

    def __init__(self, setup: Setup, clock: Clock, host_blocks: int, run: Run) -> None:
        self._setup, self._clock, self._run = setup, clock, run
        self._report = OffloadWorkerMetadata(ranks=1, capacity=host_blocks, block_bytes=int(setup.block_bytes))
        self._finished: set[str] = set()
        self._link_free_at = 0.0
        self.host_blocks = 0

    def __call__(self, scheduled: SchedulerOutput) -> KVConnectorOutput:
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, OffloadMetadata)
        for job, direction in ((metadata.store, 1), (metadata.load_now, -1)):
            if job is not None:
                self._within(job, direction)
        if metadata.load_behind is not None:
            self._behind(metadata.load_behind)
        report, self._report = self._report, OffloadWorkerMetadata()
        finished, self._finished = self._finished, set()
        return KVConnectorOutput(finished_recving=finished or None, kv_connector_worker_meta=report)

    def _within(self, job: CopyJob, direction: int) -> None:
        seconds = self._setup.copy_seconds(len(job.pairs))
        self._clock.advance(seconds)
        self._run.stalled_s += seconds
        self._done(job, direction, seconds)

    def _behind(self, job: CopyJob) -> None:
        seconds = self._setup.copy_seconds(len(job.pairs))
        self._link_free_at = max(self._link_free_at, self._clock.now) + seconds
        self._clock.after(self._link_free_at - self._clock.now, partial(self._done, job, -1, seconds))

    def _done(self, job: CopyJob, direction: int, seconds: float) -> None:
        blocks = len(job.pairs)
        self.host_blocks += direction * blocks
        self._run.link_busy_s += seconds
        if direction > 0:
            self._run.stored_blocks += blocks
        else:
            self._run.loaded_blocks += blocks
        self._report.done[job.job] = 1
        self._finished.update(job.requests)


def simulate(setup: Setup, host_blocks: int, hours: float, ours: bool = True) -> Run:
    """Let ``hours`` of traffic pass through one engine; ``ours`` off is vLLM's own recompute."""
    draw, clock, run = random.Random(setup.traffic["seed"]), Clock(), Run()
    workers = Workers(setup, clock, host_blocks, run)
    longest = sum(most for _, most in setup.spans())
    config = make_config(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_seqs,
        max_model_len=longest + setup.block_tokens,
        kv_transfer_config={
            "kv_connector": PromptsArrive.__name__,
            "kv_connector_module_path": __name__ if __name__ != "__main__" else "pd_integration.bench.scale",
            "kv_role": "kv_consumer",
        },
    )
    spec = FullAttentionSpec(block_size=setup.block_tokens, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = make_kv_cache_config(setup.blocks, [spec])
    engine = ScriptedEngine(RecomputeScheduler if ours else Scheduler, config, cache, workers)
    scheduler, preempt = engine.scheduler, engine.scheduler._preempt_request
    waiting: dict[str, tuple[Request, int, Preempted]] = {}

    def note(request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = -(-request.num_computed_tokens // setup.block_tokens)
        event = Preempted(clock.now, blocks, workers.host_blocks, False)
        done = preempt(request, *args, **kwargs)
        event.kept = ours and scheduler.connector.has_preempted_request(request.request_id)  # type: ignore[union-attr]
        run.preempted.append(event)
        waiting.setdefault(request.request_id, (request, request.num_output_tokens, event))
        return done

    scheduler._preempt_request = note  # type: ignore[method-assign]
    number = 0
    while clock.now < hours * 3600:
        while len(scheduler.requests) < setup.requests:
            prompt, output = setup.lengths(draw)
            engine.add(f"r{number}", range(prompt), output)
            number += 1
        engine.step()
        clock.advance(setup.step_seconds(sum(request.num_tokens for request in scheduler.running)))
        engine.trace.clear()
        for name, (request, tokens, event) in list(waiting.items()):
            if request.num_output_tokens > tokens:
                event.resumed_after = clock.now - event.time
                del waiting[name]
    run.output_tokens = sum(map(len, engine.outputs.values()))
    run.seconds = clock.now
    return run


def fallback_share(preempted: Sequence[Preempted], blocks: float) -> float:
    """Share of these preemptions, seen with a host without limit, that a budget of ``blocks`` would not have kept."""
    if not preempted:
        return 0.0
    return sum(event.host_before + event.blocks > blocks for event in preempted) / len(preempted)


def least_blocks(preempted: Sequence[Preempted], share: float) -> int:
    """The smallest budget, in blocks, with which no more than ``share`` of the preemptions fall back."""
    needs = sorted(event.host_before + event.blocks for event in preempted)
    spared = int(share * len(needs))
    return needs[len(needs) - 1 - spared] if needs else 0


def summary(setup: Setup, run: Run) -> dict[str, Any]:
    """The figures of one run, per card."""
    waits = [event.resumed_after for event in run.preempted if event.resumed_after is not None]
    stored, loaded = (blocks * setup.block_bytes / GB for blocks in (run.stored_blocks, run.loaded_blocks))
    return {
        "tokens/s of the engine": run.output_tokens / run.seconds,
        "preemptions an hour": 3600 * len(run.preempted) / run.seconds,
        "fallbacks": ratio(sum(not event.kept for event in run.preempted), len(run.preempted)),
        "to next token s": statistics.fmean(waits) if waits else None,
        "p99 s": percentile(waits, 99),
        "GB stored a preemption": ratio(stored, len(run.preempted)),
        "host link GB/s used": (stored + loaded) / run.seconds,
        "link busy": run.link_busy_s / run.seconds,
        "forward held up": run.stalled_s / run.seconds,
    }


def model(inputs: dict[str, Any], chosen: dict[str, Any], hours: float) -> dict[str, Any]:
    """Everything about one model: without limit on the host, with the budget that follows, and with recompute."""
    setup = Setup.of(inputs, chosen)
    unlimited = setup.requests * (setup.blocks + 1)
    free = simulate(setup, unlimited, hours)
    blocks = least_blocks(free.preempted, FALLBACK_SHARE)
    runs = {
        "no limit on the host": free,
        "that budget": simulate(setup, max(blocks, 1), hours),
        "vLLM's recompute": simulate(setup, unlimited, hours, ours=False),
    }
    link = setup.machine["host_link_bytes_per_s"] / GB
    moved = (free.stored_blocks + free.loaded_blocks) * setup.block_bytes / GB
    return {
        "name": setup.name,
        "device blocks": setup.blocks,
        "block MB": setup.block_bytes / 1e6,
        "requests per engine": setup.requests,
        "requests that fit": setup.blocks / (sum(map(statistics.fmean, setup.spans())) / setup.block_tokens),
        "budget GB per card": blocks * setup.block_bytes / GB,
        "budget GB per server": blocks * setup.block_bytes / GB * setup.machine["cards"],
        "fallback share by budget": {
            gb: fallback_share(free.preempted, gb * GB / setup.block_bytes) for gb in BUDGETS_GB
        },
        "preemptions a second that fill the link": ratio(link * len(free.preempted), moved),
        "preemptions a second": len(free.preempted) / free.seconds,
        "runs": [{"run": name, **summary(setup, run)} for name, run in runs.items()],
        "waits s": sorted(e.resumed_after for e in free.preempted if e.resumed_after is not None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, default=INPUTS, help="default: %(default)s")
    parser.add_argument("--hours", type=float, help="of virtual time per run (default: as the inputs say)")
    parser.add_argument("--reports", type=Path, default=record.REPORTS)
    options = parser.parse_args()
    record.log_errors_only()
    inputs = tomllib.loads(options.inputs.read_text(encoding="utf-8"))
    models = [model(inputs, chosen, options.hours or inputs["traffic"]["hours"]) for chosen in inputs["models"]]
    console = Console()
    console.print("A model, not a measurement: see the inputs.", markup=False)
    for one in models:
        record.show(record.table(one["name"], one["runs"]))
        record.show(record.table(f"{one['name']}: fallbacks by budget", budget_rows(one)))
        full = record.cell(one["preemptions a second that fill the link"])
        rate = one["preemptions a second"]
        console.print(
            f"{one['name']}: {one['budget GB per card']:.1f} GB per card ({one['budget GB per server']:.0f} GB per "
            f"server) keep fallbacks below {FALLBACK_SHARE:.0%}. {rate:.3f} preemptions a second; "
            f"the host link is full at {full}.",
            soft_wrap=True,
        )
    console.print(f"wrote {record.write('scale', {'inputs': inputs, 'models': models}, options.reports)}", markup=False)


if __name__ == "__main__":
    main()
