"""What every part of the benchmarks writes beside its figures, and how its tables look."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pd_integration.report import versions

REPORTS = Path("reports")


def log_errors_only() -> None:
    """Let this process log errors only; servers inherit the environment, so it stays as it is."""
    # Not the level of vLLM's loggers: vLLM sets that again whenever an engine is configured.
    logging.disable(logging.WARNING)


def about() -> dict[str, Any]:
    """When, on what machine, and of which commit: to be read with the figures, which are ratios for that reason."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions(),
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def write(part: str, figures: Mapping[str, Any], directory: Path = REPORTS) -> Path:
    """Write bench-<part>.json and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"bench-{part}.json"
    path.write_text(json.dumps({"about": about(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with the keys of the first row as its head; see `cell` for what stands in it."""
    made = Table(title=title)
    for position, column in enumerate(rows[0]):
        made.add_column(column, justify="right" if position else "left")
    for row in rows:
        made.add_row(*(cell(value) for value in row.values()))
    return made


def cell(value: Any) -> str:
    """Text of a value: three significant digits, a dash for what is missing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(*tables: Table) -> None:
    """Print to the terminal, as wide as the tables are where there is none."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    for one in tables:
        console.print(one)
