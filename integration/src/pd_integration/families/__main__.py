"""Table of every family: `python -m pd_integration.families ["gpt-oss (2 groups)" ...]`.

For each family the requests whose tokens are those of the run with an ample KV cache: after vLLM's own recompute, and
after their KV was kept on the host. Written to reports/families.json as well.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pd_integration.families import RECIPES
from pd_integration.families.run import AMPLE, ARMS, RECOMPUTE, REQUESTS, Arm, prepare_environment, run_arm

FAMILY_TIMEOUT = 900.0


def run_arms(name: str, arms: Sequence[Arm], directory: Path) -> list[dict]:
    """Run arms of one family in this process; return what each gave, tokens and all."""
    return [asdict(run_arm(RECIPES[name], arm, directory)) for arm in arms]


def in_own_process(name: str, timeout: float = FAMILY_TIMEOUT) -> list[dict]:
    """Run one family apart from this process, since vLLM keeps state for a process's life; return a row per arm.

    Raises:
        RuntimeError: it failed; with the last lines of its output.
    """
    recipe = RECIPES[name]
    arms = [arm for arm in ARMS if recipe.async_scheduling or not arm.async_scheduling]
    outcomes: list[dict] = []
    with tempfile.TemporaryDirectory() as directory:
        for batch in [[arm] for arm in arms] if recipe.process_per_arm else [arms]:
            outcomes += _spawn(name, batch, Path(directory), timeout)
    reference = outcomes[0]["tokens"]
    rows = []
    for outcome in outcomes:
        tokens, arm = outcome.pop("tokens"), outcome.pop("arm")
        same = sum(mine == theirs for mine, theirs in zip(tokens, reference, strict=True))
        rows.append({"family": name, "arm": arm["name"], "same": same, "exact": recipe.exact, **outcome})
    return rows


def _spawn(name: str, arms: Sequence[Arm], directory: Path, timeout: float) -> list[dict]:
    result = directory / "outcomes.json"
    command = [sys.executable, "-m", "pd_integration.families", "--into", str(result), name]
    command += [f"--arm={arm.name}" for arm in arms]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"family {name!r} failed:\n" + "\n".join(done.stdout.splitlines()[-40:]))
    return json.loads(result.read_text())


def table(rows: list[dict]) -> Table:
    """One line per family and arm."""
    made = Table(title=f"Requests of {REQUESTS} with the same tokens as without pressure")
    for column in ("family", "arm", "same", "preemptions", "restored", "draft acceptance"):
        made.add_column(column, justify="left" if column in ("family", "arm") else "right")
    for row in rows:
        if row["arm"] == AMPLE.name and row["acceptance"] is None:
            continue
        acceptance = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        restored = (
            "" if row["arm"] in (AMPLE.name, RECOMPUTE.name) else str(int(row["offloaded"]["preempted_restored"]))
        )
        made.add_row(row["family"], row["arm"], str(row["same"]), str(row["preemptions"]), restored, acceptance)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"one of: {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--output", type=Path, default=Path("reports/families.json"))
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--arm", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.families:
        if name not in RECIPES:
            parser.error(f"unknown family {name!r}: choose from {', '.join(RECIPES)}")
    if options.into is not None:
        prepare_environment()
        arms = [arm for arm in ARMS if arm.name in options.arm]
        options.into.write_text(json.dumps(run_arms(options.families[0], arms, options.into.parent)))
        return
    console = Console()
    rows = []
    for name in options.families or RECIPES:
        console.print(f"running {name}")
        rows += in_own_process(name)
    console.print(table(rows))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
