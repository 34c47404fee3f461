"""The demo: `python -m pd_integration.demo`.

Starts a real prefill/decode deployment of vLLM on this machine, forces preemptions on Decode, and shows that with the
connector every output is what a plain server gives and no token is computed again. Writes reports/demo.json and
reports/demo.html. Exits with status 1 when anything of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from pd_integration import report, table
from pd_integration.arms import ArmRun, run_arm, run_plain
from pd_integration.deployment import OFF, ON, ON_SYNC, Arm, Sizes, deployment, plain_server
from pd_integration.models import write_model
from pd_integration.progress import Progress
from pd_integration.servers import ServerError, terminate_as_interrupt
from pd_integration.workload import Result, WorkloadError, make_requests

MIN_PREEMPTIONS = 10


@dataclass(frozen=True)
class Settings:
    """What the demo runs."""

    requests: int = 40
    concurrency: int = 16
    prompt_tokens: int = 400
    output_tokens: int = 700
    arms: tuple[Arm, ...] = (OFF, ON, ON_SYNC)
    sizes: Sizes = field(default_factory=Sizes)


@dataclass
class Outcome:
    """The reference results and each arm's run."""

    settings: Settings
    reference: list[Result]
    runs: list[ArmRun]

    def failures(self) -> list[str]:
        """What the demo promises and did not hold; empty when all is well."""
        found = []
        for run in self.runs:
            if different := run.differing(self.reference):
                found.append(f"{run.arm.name}: outputs differ from the plain server: {', '.join(different)}")
            if not run.arm.connector:
                continue
            if len(run.preemptions) < MIN_PREEMPTIONS:
                found.append(f"{run.arm.name}: {len(run.preemptions)} preemptions, at least {MIN_PREEMPTIONS} expected")
            if needless := run.needless_recomputes():
                found.append(f"{run.arm.name}: recomputed although the host had room: {', '.join(needless)}")
        return found


def run(settings: Settings, run_dir: Path, show: Progress) -> Outcome:
    """Run the reference and every arm; logs and traces go below ``run_dir``.

    Never more than two vLLM servers run at once: Prefill, and beside it first the plain server, then one Decode a time.
    """
    requests = make_requests(settings.requests, settings.prompt_tokens, settings.output_tokens)
    total = sum(request.max_tokens for request in requests)
    with show.phase("write the model"):
        model = write_model(run_dir / "model")
    with deployment(model, run_dir, settings.sizes) as pd:
        with plain_server(model, run_dir, settings.sizes) as plain:
            with show.phase("start Prefill and a plain server"):
                plain.wait_healthy()
                pd.prefill.wait_healthy()
            with show.tokens("plain server", total) as on_tokens:
                reference = run_plain(plain, requests, settings.concurrency, on_tokens)
        runs = []
        for number, arm in enumerate(settings.arms, 1):
            with contextlib.ExitStack() as running:
                with show.phase(f"start Decode: {arm.name}"):
                    pair = running.enter_context(pd.decode(arm, run_dir / f"arm{number}"))
                with show.tokens(arm.name, total) as on_tokens:
                    runs.append(run_arm(pair, arm, requests, settings.concurrency, on_tokens))
    return Outcome(settings, reference, runs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser("python -m pd_integration.demo", description=__doc__)
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="where demo.json and demo.html go")
    parser.add_argument("--run-dir", type=Path, default=Path(".run/demo"), help="model, logs and traces; emptied first")
    args = parser.parse_args(argv)
    shutil.rmtree(args.run_dir, ignore_errors=True)
    args.run_dir.mkdir(parents=True)
    console = Console()
    try:
        with terminate_as_interrupt():
            outcome = run(Settings(), args.run_dir, Progress(console))
    except (ServerError, WorkloadError) as error:
        console.print(f"The demo could not run to its end. {error}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"All logs: {args.run_dir}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; every server is stopped.")
        return 130
    console.print(table.render(outcome.runs))
    for path in report.write(outcome, args.reports):
        console.print(f"wrote {path}", markup=False)
    failures = outcome.failures()
    for failure in failures:
        console.print(f"FAILED {failure}", style="bold red", markup=False, highlight=False)
    if not failures:
        console.print(
            f"All {len(outcome.reference)} outputs of every run equal the plain server's, token by token.",
            style="green",
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
