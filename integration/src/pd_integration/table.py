"""The comparison table: one row per figure, one column per arm."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from pd_integration.arms import ArmRun

ROWS = {
    "requests": ("requests", "{:.0f}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "offloaded": ("KV offloaded", "{:.0f}"),
    "restored": ("KV restored", "{:.0f}"),
    "fallbacks": ("fallen back", "{:.0f}"),
    "blocks_stored": ("blocks stored", "{:.0f}"),
    "blocks_loaded": ("blocks loaded", "{:.0f}"),
    "mib_stored": ("MiB stored", "{:.1f}"),
    "mib_loaded": ("MiB loaded", "{:.1f}"),
    "tokens_recomputed": ("tokens computed again", "{:,.0f}"),
    "tokens_scheduled": ("tokens scheduled", "{:,.0f}"),
    "decode_steps": ("decode steps", "{:,.0f}"),
    "wall_s": ("wall time, s", "{:.1f}"),
    "itl_p50_ms": ("inter-token p50, ms", "{:.1f}"),
    "itl_p99_ms": ("inter-token p99, ms", "{:.1f}"),
}
"""Figure (see `ArmRun.figures`) to its label and format."""
NEEDS_CONNECTOR = {"offloaded", "restored", "fallbacks", "blocks_stored", "blocks_loaded", "mib_stored", "mib_loaded"}


def cells(runs: Sequence[ArmRun]) -> list[tuple[str, list[str]]]:
    """Each row's label and its cell for every run; a dash where a figure needs the connector and the run has none."""
    figures = [(run.arm.connector, run.figures()) for run in runs]
    return [
        (
            label,
            [
                "-" if name in NEEDS_CONNECTOR and not connector else form.format(values[name])
                for connector, values in figures
            ],
        )
        for name, (label, form) in ROWS.items()
    ]


def render(runs: Sequence[ArmRun]) -> Table:
    """The table for a terminal."""
    table = Table(title="Decode under memory pressure")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.arm.name, justify="right")
    for label, row in cells(runs):
        table.add_row(label, *row)
    return table
