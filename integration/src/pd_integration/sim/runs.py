"""Running one scenario and saying how it ended; and looking for the smallest scenario that ends the same way."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pd_integration._vllm import FAILED_LOADS_BY_BLOCK
from pd_integration.sim.errors import Violation
from pd_integration.sim.scenario import Scenario
from pd_integration.sim.simulation import Simulation


@dataclass
class Outcome:
    """kind: None when all went well; else what must hold and did not, or the error and where it came from."""

    kind: str | None
    detail: str = ""
    features: Counter[str] = field(default_factory=Counter)
    trace: list[dict[str, int]] = field(default_factory=list)


def run(scenario: Scenario, steps: int, compare: bool = False) -> Outcome:
    """Run a scenario; whatever the product raises is an outcome too.

    Args:
        compare: where nothing was kept, run it again with vLLM's own scheduler and compare the schedules.
    """
    simulation = None
    try:
        simulation = Simulation(scenario)
        simulation.run(steps)
        if compare and not simulation.features["preempted_offloaded"]:
            _compare(simulation, steps)
    except Violation as violation:
        return Outcome(violation.kind, str(violation), _features(simulation), _trace(simulation))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].name}"
        detail = "".join(traceback.format_exception(error)[-3:])
        return Outcome(f"{type(error).__name__} in {place}", detail, _features(simulation), _trace(simulation))
    return Outcome(None, "", simulation.features, simulation.trace)


def _compare(simulation: Simulation, steps: int) -> None:
    """A hook that is not needed, or says no, must leave vLLM's schedule as it is."""
    if FAILED_LOADS_BY_BLOCK and simulation.features["remote load failed"] and simulation.scenario.model != "full":
        return  # such a vLLM alone does not survive that
    plain = Simulation(simulation.scenario, with_hook=False)
    try:
        plain.run(steps)
    except Violation as violation:
        if violation.kind != "no progress":
            raise
        # vLLM alone can come to a standstill, which the mixin resolves.
        simulation.features["standstill of vLLM alone"] += 1
        return
    simulation.features["schedule compared with vLLM's own"] += 1
    pairs = zip(simulation.trace, plain.trace, strict=False)
    differs = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if differs is not None or len(simulation.trace) != len(plain.trace):
        raise Violation("schedule changed", f"from step {differs} on, though nothing was kept")


def _features(simulation: Simulation | None) -> Counter[str]:
    return Counter() if simulation is None else simulation.features


def _trace(simulation: Simulation | None) -> list[dict[str, int]]:
    return [] if simulation is None else simulation.trace


SIMPLER = (
    {"ranks": 1},
    {"sibling": "none"},
    {"num_drafts": 0, "lookahead": 0},
    {"lookahead": 0},
    {"prefix_caching": False},
    {"share_prefixes": False},
    {"priority": False},
    {"zeroing": False},
    {"early_output": False},
    {"fail_stores": 0.0},
    {"fail_loads": 0.0},
    {"fail_remote": 0.0},
    {"model": "full"},
    {"mode": "sync"},
    {"store_seconds": 0.001},
    {"load_seconds": 0.001},
    {"remote_seconds": 0.01},
)


def shrink(scenario: Scenario, steps: int, kind: str, seconds: float, tell: Callable[[str], None]) -> Scenario:
    """Look for a smaller scenario that fails with the same kind, for at most so many processor seconds."""
    # Processor time: on a machine shared with others there is no less of it.
    end = time.process_time() + seconds
    smaller = True
    while smaller and time.process_time() < end:
        smaller = False
        for candidate in _smaller(scenario):
            if time.process_time() >= end:
                break
            if run(candidate, steps, compare=True).kind == kind:
                scenario, smaller = candidate, True
                tell(f"  {len(scenario.clients)} clients, {len(scenario.resets)} resets still fail")
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    clients = [client.index for client in scenario.clients]
    resets = list(range(len(scenario.resets)))
    size = len(clients) // 2
    while size:
        for at in range(len(clients) - size, -1, -size):
            yield scenario.only(clients[:at] + clients[at + size :], resets)
        size //= 2
    for reset in resets:
        yield scenario.only(clients, [r for r in resets if r != reset])
    for fields in SIMPLER:
        if any(getattr(scenario, name) != value for name, value in fields.items()):
            yield replace(scenario, **fields)


def overrides(scenario: Scenario, original: Scenario) -> dict[str, object]:
    """The plain fields in which a scenario differs from the one of its seed."""
    names = [f.name for f in dataclasses.fields(Scenario) if f.name not in ("clients", "resets")]
    return {name: getattr(scenario, name) for name in names if getattr(scenario, name) != getattr(original, name)}
