"""python -m pd_integration.matrix: run every part with every version and print the table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pd_integration.matrix import ENVIRONMENTS, PARTS, Outcome, find_hatch, install, run_part, table, write


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pd_integration.matrix", description=__doc__)
    parser.add_argument("--versions", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS), metavar="VERSION")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--output", type=Path, default=Path("reports"), help="where matrix.json and the logs go")
    options = parser.parse_args(arguments)
    logs = options.output / "matrix"
    logs.mkdir(parents=True, exist_ok=True)
    hatch = find_hatch()
    outcomes: list[Outcome] = []
    for version in options.versions:
        print(f"vLLM {version}: installing", flush=True)
        installed = install(hatch, version, logs)
        for part in options.parts:
            if installed:
                outcome = run_part(hatch, version, part, logs)
            else:
                outcome = Outcome(version, part, False, 0.0, str(logs / f"{version}-install.log"))
            outcomes.append(outcome)
            ending = "ok" if outcome.ok else f"FAILED, see {outcome.log}"
            print(f"vLLM {version}, {part}: {ending} ({outcome.seconds:.0f} s)", flush=True)
            write(outcomes, options.output / "matrix.json")
    print(table(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
