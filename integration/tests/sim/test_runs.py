"""Whole runs: repeatable, replayable, and failing where the product is broken."""

import dataclasses
import os
import subprocess
import sys

import pytest

import npu_copy.engine
from pd_integration.sim.__main__ import main
from pd_integration.sim.features import REQUIRED
from pd_integration.sim.mutations import MUTATIONS, PACKAGES, Mutation, apply
from pd_integration.sim.runs import overrides, run, shrink
from pd_integration.sim.scenario import MODELS, MODES, generate

STEPS = 40


def busy_seed(mode):
    """A seed in which requests are saved and restored."""
    for seed in range(200):
        scenario = generate(seed, STEPS)
        if scenario.mode == mode:
            outcome = run(scenario, STEPS)
            if outcome.features["preempted_restored"] >= 2:
                return scenario, outcome
    raise AssertionError("no seed restores anything")


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_runs_alike_each_time(mode):
    scenario, first = busy_seed(mode)
    second = run(scenario, STEPS)
    assert first.kind is None, first.detail
    assert (second.trace, second.features) == (first.trace, first.features)


def test_a_seed_runs_alike_in_every_process():
    """Python hashes strings differently in each process; nothing may depend on it."""
    code = (
        "from pd_integration.sim.runs import run\n"
        "from pd_integration.sim.scenario import generate\n"
        "from pd_integration.sim.simulation import quiet\n"
        "with quiet():\n"
        f"    print([run(generate(seed, {STEPS}), {STEPS}).trace for seed in range(6)])\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]


def test_the_generator_reaches_every_model_and_mode():
    scenarios = [generate(seed, STEPS) for seed in range(300)]
    assert {scenario.model for scenario in scenarios} == set(MODELS)
    assert {scenario.mode for scenario in scenarios} == set(MODES)
    assert all(scenario.num_blocks > scenario.least_blocks for scenario in scenarios)


@pytest.fixture
def broken(monkeypatch):
    """A product in which the compute stream does not wait for stores."""
    submit = npu_copy.engine.CopyEngine.submit

    def careless(self, job, pairs, direction, *, block_compute=False):
        start = self._backend.start
        self._backend.start = lambda *args, **kwargs: _Careless(start(*args, **kwargs))
        try:
            submit(self, job, pairs, direction, block_compute=block_compute)
        finally:
            del self._backend.start

    class _Careless:
        def __init__(self, copy):
            self._copy = copy

        def block_compute(self):
            pass

        def __getattr__(self, name):
            return getattr(self._copy, name)

    monkeypatch.setattr(npu_copy.engine.CopyEngine, "submit", careless)


def first_failure():
    for seed in range(100):
        scenario = generate(seed, STEPS)
        outcome = run(scenario, STEPS)
        if outcome.kind is not None:
            return scenario, outcome
    raise AssertionError("the broken product was not noticed")


def test_a_broken_product_fails_and_the_failure_shrinks(broken):
    scenario, outcome = first_failure()
    assert outcome.kind == "device block race"
    small = shrink(scenario, STEPS, outcome.kind, seconds=10.0, tell=lambda _: None)
    assert run(small, STEPS).kind == outcome.kind
    assert len(small.clients) < len(scenario.clients)
    assert small.ranks == 1


def test_a_failure_is_told_with_a_command_that_replays_it(broken, capsys, monkeypatch):
    monkeypatch.setattr("pd_integration.sim.__main__.SHRINK_SECONDS", 5.0)
    assert main(["--seeds", "100", "--steps", str(STEPS)]) == 1
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "pd_integration.sim"]
    assert main(command[3:]) == 1
    assert "device block race" in capsys.readouterr().out


def test_a_feature_that_never_occurs_fails_the_run(capsys):
    assert main(["--seeds", "1", "--steps", "5"]) == 2
    assert "never occurred: " in capsys.readouterr().out
    assert len(set(REQUIRED)) == len(REQUIRED)


def test_only_and_overrides_describe_a_part_of_a_seed():
    scenario = generate(3, STEPS)
    kept = [client.index for client in scenario.clients][1::2]
    part = dataclasses.replace(scenario.only(kept, []), ranks=1, sibling="none")
    assert [client.index for client in part.clients] == kept
    assert part.resets == ()
    assert set(overrides(part, scenario)) <= {"ranks", "sibling"}


def test_an_unknown_field_is_refused():
    with pytest.raises(SystemExit, match="has no colour"):
        main(["--seed", "1", "--set", "colour=blue"])


@pytest.fixture
def sources(tmp_path):
    import importlib.util
    import shutil
    from pathlib import Path

    for package in PACKAGES:
        origin = importlib.util.find_spec(package).origin
        shutil.copytree(Path(origin).parent, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_mutation_finds_its_line(mutation, sources):
    before = (sources / mutation.path).read_text()
    apply(mutation, sources)
    after = (sources / mutation.path).read_text()
    assert after != before
    compile(after, mutation.path, "exec")


def test_a_mutation_without_its_line_is_an_error(sources):
    gone = Mutation("nothing", "npu_copy/engine.py", "no such line", "pass")
    with pytest.raises(ValueError, match="0 times, not once"):
        apply(gone, sources)
