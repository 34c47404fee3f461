"""The supported versions of vLLM, each in an environment of its own: `hatch run matrix`.

For every version: the packages' unit tests, the simulator's slice against that version's real scheduler, and the demo
on its real servers. One after the other, since servers and simulator want the whole machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ENVIRONMENTS = {"0.23.0": "vllm.0.23.0", "0.28.0": "vllm.0.28.0", "0.32.0": "default"}
"""Version of vLLM to the environment in hatch.toml."""

PARTS = {"unit": 1800.0, "sim-slice": 1200.0, "demo": 900.0}
"""Script in hatch.toml to the seconds it may take, installation apart."""

INSTALL_SECONDS = 1800.0


@dataclass(frozen=True)
class Outcome:
    """How one part ended with one version. seconds: without installing."""

    version: str
    part: str
    ok: bool
    seconds: float
    log: str


def find_hatch() -> list[str]:
    """Return the command that runs hatch.

    Raises:
        FileNotFoundError: it is neither a command nor a module of the Python that this environment was made with.
    """
    if command := shutil.which("hatch"):
        return [command]
    python = getattr(sys, "_base_executable", sys.executable)
    known = subprocess.run([python, "-m", "hatch", "--version"], capture_output=True, timeout=60, check=False)
    if known.returncode:
        raise FileNotFoundError(
            f"hatch is neither a command nor a module of {python}; put it on the PATH, or run "
            f"{python} -m pip install hatch"
        )
    return [python, "-m", "hatch"]


def run_part(hatch: Sequence[str], version: str, part: str, logs: Path) -> Outcome:
    """Run one part in the environment of `version`; its output goes to a file in `logs`."""
    log = logs / f"{version}-{part}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        code = _run([*hatch, "run", f"{ENVIRONMENTS[version]}:{part}"], file.fileno(), PARTS[part])
    return Outcome(version, part, code == 0, time.monotonic() - began, str(log))


def install(hatch: Sequence[str], version: str, logs: Path) -> bool:
    """Make the environment of `version`, or bring it up to date. False: it could not be made."""
    with (logs / f"{version}-install.log").open("w", encoding="utf-8") as file:
        return _run([*hatch, "run", f"{ENVIRONMENTS[version]}:prepare"], file.fileno(), INSTALL_SECONDS) == 0


def _run(command: Sequence[str], output: int, seconds: float) -> int:
    # The nested hatch must not take this environment for its own.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HATCH_ENV", "VIRTUAL_ENV"))}
    process = subprocess.Popen(command, stdout=output, stderr=output, env=inherited, start_new_session=True)
    try:
        return process.wait(seconds)
    except BaseException as error:
        # An interrupt, so that servers further down end theirs; then without mercy.
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            return 124
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    for signal, patience in ((2, 60.0), (9, 10.0)):
        try:
            os.killpg(process.pid, signal)
            process.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table, a row for each version."""
    parts = list(dict.fromkeys(outcome.part for outcome in outcomes))
    lines = ["| vLLM | " + " | ".join(parts) + " |", "| :-- |" + " --: |" * len(parts)]
    for version in dict.fromkeys(outcome.version for outcome in outcomes):
        cells = {o.part: f"{'ok' if o.ok else 'FAILED'}, {o.seconds:.0f} s" for o in outcomes if o.version == version}
        lines.append(f"| {version} | " + " | ".join(cells.get(part, "-") for part in parts) + " |")
    return "\n".join(lines)


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the outcomes as JSON."""
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")
