"""Arithmetic of the decode benchmark: from tokens, their times and the step trace to the figures of one run."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pd_integration.trace import LOADING, Step, histories


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of ``values`` that at least ``percent`` percent of them do not exceed; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def ratio(value: float | None, base: float | None) -> float | None:
    """``value / base``; None where either is missing or the base is 0."""
    return None if value is None or not base else value / base


def request_number(internal: str) -> int:
    """The benchmark's number of a request, from vLLM's internal ``<number>.<tokens before>-<random suffix>``."""
    return int(internal.split(".", 1)[0])


def resumptions(times: Sequence[Sequence[float]], steps: Sequence[Step]) -> list[tuple[float, int]]:
    """For each preemption (seconds until the request's next token, steps with scheduled tokens until then).

    ``times`` are each request's token times. The step that preempts counts: the request was to run in it.
    """
    work = [step.t for step in steps if step.tokens]
    found = []
    for step in steps:
        for internal in step.preempted:
            own = times[request_number(internal)]
            at = bisect_right(own, step.t)
            if at < len(own):
                end = own[at]
                # A preempted request that preempts again before its next token counts once for each.
                found.append((end - step.t, sum(step.t <= t < end for t in work)))
    return found


class ActiveTime:
    """Times since the epoch, with the ``pauses`` (start, end) before them taken out."""

    def __init__(self, pauses: Sequence[tuple[float, float]]) -> None:
        self._ends = [end for _, end in pauses]
        self._gone = list(accumulate((end - start for start, end in pauses), initial=0.0))

    def __call__(self, time: float) -> float:
        return time - self._gone[bisect_right(self._ends, time)]


def preempted_numbers(steps: Sequence[Step]) -> set[int]:
    """The requests that were preempted at least once."""
    return {request_number(internal) for step in steps for internal in step.preempted}


def figures(times: Sequence[Sequence[float]], sent: Sequence[float], steps: Sequence[Step]) -> dict[str, float | None]:
    """The figures of one run that its tokens and its step trace tell; seconds, or milliseconds for latencies.

    Args:
        times: per request, when each of its tokens came; seconds since the epoch.
        sent: per request, when it was sent.
        steps: the trace.
    """
    latencies = [[1e3 * (b - a) for a, b in pairwise(own)] for own in times]
    preempted = preempted_numbers(steps)
    every = [value for own in latencies for value in own]
    theirs = [value for number in sorted(preempted) for value in latencies[number]]
    resumed = resumptions(times, steps)
    known = histories(list(steps)).values()
    loading = [lane.end - lane.start for history in known for lane in history.lane if lane.kind == LOADING]
    seconds = max(own[-1] for own in times) - min(sent)
    tokens = sum(map(len, times))
    return {
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": sum(bool(step.tokens) for step in steps),
        "scheduled_tokens": sum(count for step in steps for _, count, _ in step.tokens.values()),
        "preemptions": sum(len(step.preempted) for step in steps),
        "computed_again": sum(history.recomputed for history in known),
        "kv_in_use": statistics.fmean(step.usage for step in steps),
        "loading_s": sum(loading),
        "itl_p50_ms": percentile(every, 50),
        "itl_p99_ms": percentile(every, 99),
        "preempted_itl_p50_ms": percentile(theirs, 50),
        "preempted_itl_p99_ms": percentile(theirs, 99),
        "resume_s": statistics.fmean(s for s, _ in resumed) if resumed else None,
        "resume_steps": statistics.fmean(n for _, n in resumed) if resumed else None,
    }
