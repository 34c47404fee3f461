"""Plots of the benchmarks as SVG text, to stand in a page as they are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text: small, and it can be searched
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e5e5e5",
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)

COLOURS = {
    "ample KV cache": "#9aa0a6",
    "connector": "#1a73e8",
    "connector, copies free": "#a3c7f7",
    "vLLM's recompute": "#d93025",
    "resend to Prefill": "#f9ab00",
    "OffloadingConnector": "#188038",
}
DECODE = (
    ("throughput", "Output tokens/s, relative to an ample KV cache", False),
    ("resume_s", "From preemption to the next token, seconds", True),
    ("itl_p99_ms", "Inter-token latency of all requests, p99, ms", False),
    ("preempted_itl_p99_ms", "Inter-token latency of preempted requests, p99, ms", False),
    ("computed_again", "Tokens computed twice on Decode", False),
)
"""Figure of a row, what it is, and whether its axis is logarithmic."""


def svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG element; ``salt`` makes its ids differ from those of others in the page."""
    with rc_context({"svg.hashsalt": salt}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def arms(cells: Sequence[dict[str, Any]], name: str, label: str, logarithmic: bool) -> str:
    """A group of bars for each cell, a bar for each arm."""
    figure, axes = _axes(10)
    names = [arm for arm in COLOURS if any(row["arm"] == arm for cell in cells for row in cell["rows"])]
    width = 0.85 / len(names)
    for place, arm in enumerate(names):
        found = [
            (at + (place - (len(names) - 1) / 2) * width, row[name])
            for at, cell in enumerate(cells)
            for row in cell["rows"]
            if row["arm"] == arm and row[name] is not None
        ]
        if found:
            xs, ys = zip(*found, strict=True)
            axes.bar(xs, ys, width, color=COLOURS[arm], label=arm)
    axes.set_xticks(range(len(cells)), [_name(cell) for cell in cells])
    axes.set_title(label, loc="left")
    if logarithmic:
        axes.set_yscale("log")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=8)
    return svg(figure, name)


def _name(cell: dict[str, Any]) -> str:
    text = f"{cell['prompt']}\n{cell['pressure']:g}x"
    return f"{text} P/D" if cell["source"] == "Prefill" else text


def victims(data: dict[str, Any]) -> str:
    """Time that a preemption adds, against the victim's blocks, and the line through it."""
    figure, axes = _axes(5.5)
    blocks = [row["blocks"] for row in data["sizes"]]
    line = data["line, ms and blocks"]
    axes.plot(blocks, [row["added ms"] for row in data["sizes"]], "o", color=COLOURS["connector"])
    ends = [0, blocks[-1]]
    axes.plot(ends, [line["intercept"] + line["slope"] * end for end in ends], color="#9aa0a6")
    axes.set_title(f"A victim: {1e3 * line['slope']:.3f} us a block", loc="left")
    _labels(axes, "blocks of the victim", "ms added to vLLM's preemption")
    return svg(figure, "victims")


def neighbours(rows: Sequence[dict[str, Any]]) -> str:
    """Step lengths with and without transfers."""
    figure, axes = _axes(6.5)
    columns = {"p50 without": "#cfd8dc", "p50 ms": "#a3c7f7", "p99 without": "#9aa0a6", "p99 ms": "#1a73e8"}
    for place, (column, colour) in enumerate(columns.items()):
        xs = [at + (place - 1.5) * 0.2 for at in range(len(rows))]
        label = column if "without" in column else column.replace(" ms", " with transfers")
        axes.bar(xs, [row[column] for row in rows], 0.2, color=colour, label=label)
    axes.set_xticks(range(len(rows)), [f"{row['victim tokens']} tokens\n{row['victim MiB']:g} MiB" for row in rows])
    axes.set_title("Inter-token latency while one victim is stored and another loaded, ms", loc="left")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=2, fontsize=8)
    return svg(figure, "neighbours")


def scale(models: Sequence[dict[str, Any]]) -> str:
    """Fallbacks against the budget, and how long preempted requests wait."""
    figure = Figure(figsize=(10, 3))
    left, right = figure.subplots(1, 2)
    for model in models:
        shares = model["fallback share by budget"]
        left.plot([float(gb) for gb in shares], [100 * s for s in shares.values()], "o-", label=model["name"])
        waits = model["waits s"]
        right.plot(waits, [100 * (at + 1) / len(waits) for at in range(len(waits))], label=model["name"])
    left.set_xscale("log", base=2)
    left.set_title("Model: preemptions that fall back, %", loc="left")
    _labels(left, "budget per card, GB", "")
    right.set_title("Model: preempted requests with their next token, %", loc="left")
    _labels(right, "seconds since the preemption", "")
    left.legend(fontsize=8)
    return svg(figure, "scale")


def copies(rows: Sequence[dict[str, Any]]) -> str:
    """Copy speed relative to a plain memcpy of as many bytes."""
    figure, axes = _axes(10)
    for place, (direction, colour) in enumerate({"store": "#1a73e8", "load": "#a3c7f7"}.items()):
        xs = [at + (place - 0.5) * 0.4 for at in range(len(rows))]
        axes.bar(xs, [row[direction]["engine_to_memcpy"] for row in rows], 0.4, color=colour, label=direction)
    names = [f"{row['shape']}\n{row['blocks']} {row['ids'][:4]}" for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=6)
    axes.axhline(1, color="#9aa0a6")
    axes.set_title("Copies, relative to memcpy", loc="left")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=2, fontsize=8)
    return svg(figure, "copies")


def _axes(width: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3))
    return figure, figure.subplots()


def _labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
