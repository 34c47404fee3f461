"""Table of every family: `python -m pd_integration.families ["gpt-oss (2 groups)" ...]`.

For each family the requests whose tokens are those of the run with an ample KV cache: after vLLM's own recompute, and
after their KV was kept on the host. Written to reports/families.json as well.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pd_integration.families import RECIPES
from pd_integration.families.run import AMPLE, ARMS, RECOMPUTE, REQUESTS, prepare_environment, run_arm

FAMILY_TIMEOUT = 900.0


def run_family(name: str) -> list[dict]:
    """Run one family's arms in this process; return one row per arm."""
    recipe = RECIPES[name]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        ample = None
        for arm in ARMS:
            if arm.async_scheduling and not recipe.async_scheduling:
                continue
            outcome = run_arm(recipe, arm, Path(directory))
            ample = ample or outcome
            row = {key: value for key, value in asdict(outcome).items() if key not in ("arm", "tokens")}
            rows.append({"family": name, "arm": arm.name, "same": outcome.same(ample), "exact": recipe.exact, **row})
    return rows


def in_own_process(name: str, timeout: float = FAMILY_TIMEOUT) -> list[dict]:
    """Run one family in a process of its own, since vLLM keeps state for a process's life.

    Raises:
        RuntimeError: it failed; with the last lines of its output.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, "-m", "pd_integration.families", "--into", result.name, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f"family {name!r} failed:\n" + "\n".join(done.stdout.splitlines()[-40:]))
        return json.loads(result.read())


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
    options = parser.parse_args()
    for name in options.families:
        if name not in RECIPES:
            parser.error(f"unknown family {name!r}: choose from {', '.join(RECIPES)}")
    if options.into is not None:
        prepare_environment()
        options.into.write_text(json.dumps(run_family(options.families[0])))
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
