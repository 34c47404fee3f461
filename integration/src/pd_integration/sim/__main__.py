"""python -m pd_integration.sim: run seeds, print what occurred, and for a failure the smallest run that shows it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import shlex
import sys
import time
from collections import Counter
from typing import Any

from pd_integration.sim.features import REQUIRED
from pd_integration.sim.runs import Outcome, overrides, run, shrink
from pd_integration.sim.scenario import Client, Reset, Scenario, generate
from pd_integration.sim.simulation import quiet

SHRINK_SECONDS = 60.0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    with quiet():
        return _replay(options) if options.seed is not None else _run_seeds(options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pd_integration.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first-seed", type=int, default=0, help="where to start")
    parser.add_argument("--steps", type=int, default=400, help="steps during which clients keep coming")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time at the latest")
    parser.add_argument("--no-shrink", action="store_true", help="print a failure as it is")
    parser.add_argument("--seed", type=int, help="run this seed only and say how it ends")
    parser.add_argument("--clients", help="of this seed, only these clients: 0,4,7")
    parser.add_argument("--resets", help="of this seed, only these resets: 0,1 or none")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the seed's scenario")
    return parser.parse_args(arguments)


def _run_seeds(options: argparse.Namespace) -> int:
    start = told = time.monotonic()
    features: Counter[str] = Counter()
    done = 0
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        now = time.monotonic()
        if now - start > 60 * options.minutes:
            print(f"stopped after {options.minutes} minutes: {done} of {options.seeds} seeds", flush=True)
            break
        if now - told > 10:
            told = now
            print(f"{done} seeds in {now - start:.0f} s", flush=True)
        scenario = generate(seed, options.steps)
        outcome = run(scenario, options.steps, compare=True)
        if outcome.kind is not None:
            _report(scenario, outcome, options)
            return 1
        features.update(outcome.features)
        done += 1
    return _summarize(features, done, time.monotonic() - start)


def _summarize(features: Counter[str], seeds: int, seconds: float) -> int:
    width = max(map(len, REQUIRED))
    for feature in REQUIRED:
        print(f"{feature:{width}} {features[feature]:9}")
    print(f"{seeds} seeds, {features['decode step']} decode steps of a request, {seconds:.0f} s: no violation")
    missing = [feature for feature in REQUIRED if not features[feature]]
    if missing:
        print(f"FAILED: never occurred: {', '.join(missing)}; run more seeds, or mend the generator")
        return 2
    return 0


def _report(scenario: Scenario, outcome: Outcome, options: argparse.Namespace) -> None:
    print(f"FAILED: seed {scenario.seed}: {outcome.detail}", flush=True)
    assert outcome.kind is not None
    small = scenario
    if not options.no_shrink:
        print("looking for a smaller run that fails alike ...", flush=True)
        small = shrink(scenario, options.steps, outcome.kind, SHRINK_SECONDS, tell=print)
    _describe(small, run(small, options.steps, compare=True))
    print("replay with:\n  " + _command(small, options.steps))


def _command(scenario: Scenario, steps: int) -> str:
    original = generate(scenario.seed, steps)
    words = [f"python -m pd_integration.sim --steps {steps} --seed {scenario.seed}"]
    if scenario.clients != original.clients:
        words.append("--clients " + ",".join(str(client.index) for client in scenario.clients))
    if scenario.resets != original.resets:
        kept = [str(i) for i, reset in enumerate(original.resets) if reset in scenario.resets]
        words.append(f"--resets {','.join(kept) or 'none'}")
    words += [f"--set {name}={shlex.quote(str(value))}" for name, value in overrides(scenario, original).items()]
    return " ".join(words)


def _replay(options: argparse.Namespace) -> int:
    scenario = generate(options.seed, options.steps)
    clients = [client.index for client in scenario.clients]
    resets = list(range(len(scenario.resets)))
    if options.clients is not None:
        clients = [int(word) for word in options.clients.split(",")]
    if options.resets is not None:
        resets = [] if options.resets == "none" else [int(word) for word in options.resets.split(",")]
    changes = dict(word.split("=", 1) for word in options.set)
    unknown = changes.keys() - {field.name for field in dataclasses.fields(Scenario)}
    if unknown:
        sys.exit(f"--set: a scenario has no {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {name: _value(word) for name, word in changes.items()}
    scenario = dataclasses.replace(scenario.only(clients, resets), **values)
    outcome = run(scenario, options.steps, compare=True)
    _describe(scenario, outcome)
    return 0 if outcome.kind is None else 1


def _value(word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def _describe(scenario: Scenario, outcome: Outcome) -> None:
    for field in dataclasses.fields(scenario):
        value = getattr(scenario, field.name)
        if field.name in ("clients", "resets"):
            print(f"{field.name}:")
            for one in value:
                print(f"  {_brief(one)}")
        else:
            print(f"{field.name}: {value}")
    print("last steps (tokens scheduled by request):")
    for number, tokens in list(enumerate(outcome.trace, 1))[-12:]:
        print(f"  {number}: {tokens}")
    print(outcome.detail if outcome.kind is not None else "no violation")


def _brief(one: Client | Reset) -> str:
    words = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    if "prompt" in words:
        words["prompt"] = f"{len(words['prompt'])} tokens"
    return ", ".join(f"{name} {value}" for name, value in words.items())


if __name__ == "__main__":
    sys.exit(main())
