"""Run the workload on one arm and turn what was seen into figures."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from pd_integration import workload
from pd_integration.deployment import BLOCK_TOKENS, MODEL_NAME, Arm, Pair
from pd_integration.metrics import HostSample, read_offload_figures, sampled_host_use
from pd_integration.servers import Server
from pd_integration.trace import History, Preemption, Step, histories, read_trace
from pd_integration.workload import Request, Result, WorkloadError

MIB = 1 << 20


@dataclass
class ArmRun:
    """Everything seen in one run of the workload on one arm."""

    arm: Arm
    results: list[Result]
    steps: list[Step]
    offload: dict[str, float] = field(default_factory=dict)
    """The connector's own metrics at the end; empty without the connector."""
    host_samples: list[HostSample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histories: dict[str, History] = {
            client_id(internal): history for internal, history in histories(self.steps).items()
        }

    @property
    def preemptions(self) -> list[Preemption]:
        """All preemptions, by the trace."""
        return [event for history in self.histories.values() for event in history.preemptions]

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that Decode's scheduler scheduled although they had been computed before, by the trace."""
        return sum(history.recomputed for history in self.histories.values())

    @property
    def wall_s(self) -> float:
        """Seconds from the first request sent to the last token."""
        return max(result.times[-1] for result in self.results) - min(result.start for result in self.results)

    def figures(self) -> dict[str, float]:
        """The rows of the comparison table; times in seconds, latencies in milliseconds."""
        latencies = sorted(latency for result in self.results for latency in result.latencies)
        return {
            "requests": len(self.results),
            "preemptions": len(self.preemptions),
            "offloaded": self.offload.get("preempted_offloaded", 0),
            "restored": self.offload.get("preempted_restored", 0),
            "fallbacks": sum(value for name, value in self.offload.items() if name.startswith("fallback")),
            "blocks_stored": self.offload.get("blocks_stored", 0),
            "blocks_loaded": self.offload.get("blocks_loaded", 0),
            "mib_stored": self.offload.get("bytes_stored", 0) / MIB,
            "mib_loaded": self.offload.get("bytes_loaded", 0) / MIB,
            "tokens_scheduled": sum(count for step in self.steps for _, count, _ in step.tokens.values()),
            "tokens_recomputed": self.recomputed_tokens,
            "decode_steps": sum(bool(step.tokens) for step in self.steps),
            "wall_s": self.wall_s,
            "itl_p50_ms": 1000 * percentile(latencies, 50),
            "itl_p99_ms": 1000 * percentile(latencies, 99),
        }

    def differing(self, reference: Sequence[Result]) -> list[str]:
        """Ids of the requests whose token ids differ from ``reference``, with the first position that does."""
        return [
            f"{ours.request.id} (token {_first_difference(ours.token_ids, theirs.token_ids)})"
            for ours, theirs in zip(self.results, reference, strict=True)
            if ours.token_ids != theirs.token_ids
        ]

    def needless_recomputes(self) -> list[str]:
        """Requests of an arm with the connector that computed tokens again although the host pool had room for them.

        The pool had room if what the request had computed would have fitted beside the most that was ever in use.
        """
        room = self.offload.get("host_blocks_total", 0) - self.offload.get("host_blocks_high_water", 0)
        return [
            f"{request} ({history.recomputed} tokens)"
            for request, history in self.histories.items()
            if history.recomputed > 0 and -(-history.high_water // BLOCK_TOKENS) <= room
        ]


def client_id(internal: str) -> str:
    """The id the client sent, from vLLM's internal ``cmpl-<id>-<prompt index>-<random suffix>``."""
    return internal.removeprefix("cmpl-").rsplit("-", 2)[0]


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The ``percent``-th percentile of sorted values; 0 for fewer than two."""
    return statistics.quantiles(ordered, n=100)[percent - 1] if len(ordered) > 1 else 0.0


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def run_plain(
    server: Server, requests: Sequence[Request], concurrency: int, on_tokens: Callable[[int], None]
) -> list[Result]:
    """The workload on the plain server: the reference outputs."""
    return asyncio.run(workload.run(server.url, MODEL_NAME, requests, concurrency, on_tokens, server.check_alive))


def run_arm(
    pair: Pair, arm: Arm, requests: Sequence[Request], concurrency: int, on_tokens: Callable[[int], None]
) -> ArmRun:
    """The workload through the proxy of ``pair``, whose Decode runs as ``arm`` says.

    A failure comes with what the servers logged last: there one finds a transfer that failed. ServerError if one of
    them died, WorkloadError otherwise.
    """
    try:
        results, offload, samples = asyncio.run(_drive(pair, arm, requests, concurrency, on_tokens))
    except WorkloadError as error:
        pair.check()  # a death explains more than the broken request that it caused
        logs = "\n".join(server.log_tail() for server in (pair.prefill, pair.decode, pair.proxy))
        raise WorkloadError(f"{arm.name}: {error}\n{logs}") from error
    return ArmRun(arm, results, read_trace(pair.trace), offload, samples)


async def _drive(
    pair: Pair, arm: Arm, requests: Sequence[Request], concurrency: int, on_tokens: Callable[[int], None]
) -> tuple[list[Result], dict[str, float], list[HostSample]]:
    async with contextlib.AsyncExitStack() as stack:
        samples = await stack.enter_async_context(sampled_host_use(pair.decode.url)) if arm.connector else []
        results = await workload.run(pair.proxy.url, MODEL_NAME, requests, concurrency, on_tokens, pair.check)
    async with aiohttp.ClientSession() as session:
        return results, await read_offload_figures(session, pair.decode.url), samples
