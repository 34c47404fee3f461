"""python -m pd_integration.sim.mutations: break the product, one line at a time, and see that the simulator notices.

Each mutation is applied to a copy of the packages' sources; the slice that CI runs must fail on it. A mutation whose
line is no longer there is an error: the table must follow the product.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("block_mapper", "npu_copy", "offload_connector", "recompute_scheduler")
SLICE = ("--steps", "100", "--first-seed", "300", "--seeds", "240", "--minutes", "10")
"""What CI runs: about a minute on a free core."""
TIMEOUT = 900.0


@dataclass(frozen=True)
class Mutation:
    """what: the mistake. path: source file. line: what stands there, once. becomes: the mistake itself."""

    what: str
    path: str
    line: str
    becomes: str


MUTATIONS = (
    Mutation(
        "the compute stream does not wait for a store",
        "npu_copy/engine.py",
        "blocks = block_compute or direction is Direction.STORE",
        "blocks = block_compute",
    ),
    Mutation(
        "copies do not wait for the compute stream",
        "npu_copy/backends/stream.py",
        "stream.wait_event(ready)",
        "pass",
    ),
    Mutation(
        "the forward does not wait for a load within its step",
        "offload_connector/worker.py",
        "self._engine.submit(within.job, within.pairs, Direction.LOAD, block_compute=True)",
        "self._engine.submit(within.job, within.pairs, Direction.LOAD)",
    ),
    Mutation(
        "nobody waits for a store before another connector may write",
        "offload_connector/worker.py",
        "for job in self._open_stores:",
        "for job in ():",
    ),
    Mutation(
        "a failure within the step is reported when the token is gone",
        "offload_connector/worker.py",
        "for job in self._loads_within:",
        "for job in ():",
    ),
    Mutation(
        "the blocks of a load that failed within its step are not reported",
        "offload_connector/worker.py",
        "self._failed_blocks.update(load.pairs[:, 1].tolist())",
        "pass",
    ),
    Mutation(
        "a failed copy counts as done",
        "offload_connector/worker.py",
        "self._report.failed[result.job] = str(error)",
        "pass",
    ),
    Mutation(
        "one rank's report is enough",
        "block_mapper/jobs.py",
        "if job.reports < self.world_size:",
        "if job.reports < 1:",
    ),
    Mutation(
        "host blocks are freed before the copy is done",
        "block_mapper/jobs.py",
        "self.pool.retain(blocks)",
        "self.pool.refs[blocks] += self.pool.refs[blocks] == 0",
    ),
    Mutation(
        "null blocks are compressed away",
        "block_mapper/mapping.py",
        "table[positions] = blocks",
        "table[: len(positions)] = blocks",
    ),
    Mutation(
        "a load writes over blocks of the device's prefix cache",
        "block_mapper/mapping.py",
        "used = slice(device_tokens // group.block_size, min(group.num_positions(num_tokens), len(table)))",
        "used = slice(0, min(group.num_positions(num_tokens), len(table)))",
    ),
    Mutation(
        "the window ends one token late",
        "block_mapper/groups.py",
        "return max(0, num_tokens - self.window + 1)",
        "return max(0, num_tokens - self.window - 1)",
    ),
    Mutation(
        "a request whose store is not done is let in",
        "offload_connector/manager.py",
        "if state is State.STORING:",
        "if state is None:",
    ),
    Mutation(
        "an ended request keeps its host blocks",
        "offload_connector/connector.py",
        "self.manager.finished(request.request_id)",
        "pass",
    ),
    Mutation(
        "rejected drafts are forgotten when a recurrent state is saved",
        "offload_connector/last_steps.py",
        "rejected = max(0, last.drafts - last.accepted)",
        "rejected = 0",
    ),
    Mutation(
        "loaded requests that hold each other's blocks wait for ever",
        "recompute_scheduler/preemption.py",
        "if self._standstill:",
        "if False:",
    ),
    Mutation(
        "KV is saved at reset_prefix_cache",
        "recompute_scheduler/preemption.py",
        "asked = self._inside_schedule and bool(self._hooks)",
        "asked = bool(self._hooks)",
    ),
    Mutation(
        "what was saved before a reset of running requests stays",
        "recompute_scheduler/preemption.py",
        "if reset_running_requests:",
        "if False:",
    ),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pd_integration.sim.mutations", description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutations to try; default: all")
    options = parser.parse_args(arguments)
    numbers = options.only or range(1, len(MUTATIONS) + 1)
    lived = 0
    for number in numbers:
        mutation = MUTATIONS[number - 1]
        start = time.monotonic()
        found = _try(mutation)
        lived += found is None
        seconds = time.monotonic() - start
        print(f"{number:2}  {mutation.what:75} {found or 'NOT FOUND'}  ({seconds:.0f} s)", flush=True)
    print(f"{len(numbers) - lived} of {len(numbers)} mutations found")
    return 1 if lived else 0


def _try(mutation: Mutation) -> str | None:
    """Run the slice on a mutated copy; return the violation, or None when it passes."""
    with tempfile.TemporaryDirectory(prefix="mutation") as directory:
        sources = Path(directory)
        for package in PACKAGES:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutation, sources)
        path = os.pathsep.join(filter(None, (directory, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pd_integration.sim", *SLICE, "--no-shrink"]
        result = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT
        )
    failures = [line for line in result.stdout.splitlines() if line.startswith("FAILED: seed")]
    if failures:
        return failures[0].removeprefix("FAILED: ")[:110]
    if result.returncode == 0:
        return None
    raise RuntimeError(f"the slice did not run: {(result.stdout + result.stderr)[-2000:]}")


def apply(mutation: Mutation, sources: Path) -> None:
    """Change the one line. ValueError when it is not there exactly once."""
    file = sources / mutation.path
    text = file.read_text()
    if text.count(mutation.line) != 1:
        raise ValueError(
            f"{mutation.path} has the line {mutation.line!r} {text.count(mutation.line)} times, not once: "
            "write the mutation anew for the code as it is"
        )
    file.write_text(text.replace(mutation.line, mutation.becomes))


if __name__ == "__main__":
    sys.exit(main())
