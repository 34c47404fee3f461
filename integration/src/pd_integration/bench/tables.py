"""Rows of the tables that the terminal and the page both show, made from the reports alone: nothing here needs vLLM."""

from __future__ import annotations

from typing import Any


def arm_rows(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell of the decode benchmark, arm by arm."""
    return [
        {
            "arm": row["arm"],
            "tokens/s": row["throughput"],
            "steps": row["steps"],
            "preemptions": row["preemptions"],
            "computed again": row["computed_again"] + row["resent_tokens"],
            "KV in use": row["kv_in_use"],
            "ITL p50 ms": row["itl_p50_ms"],
            "p99": row["itl_p99_ms"],
            "preempted p50": row["preempted_itl_p50_ms"],
            "p99 ": row["preempted_itl_p99_ms"],
            "to next token s": row["resume_s"],
            "steps ": row["resume_steps"],
        }
        for row in cell["rows"]
    ]


def cell_title(cell: dict[str, Any]) -> str:
    """What a cell of the decode benchmark is."""
    return f"{cell['prompt']} tokens of prompt, pressure {cell['pressure']:g}, prompts' KV {cell['source']}"


def summary_rows(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The decode benchmark's targets, cell by cell."""
    return [
        {
            "prompt": cell["prompt"],
            "pressure": cell["pressure"],
            "KV": cell["source"],
            "to free copies, tokens/s": cell["ours_to_free"],
            "to free copies, CPU": cell["ours_to_free_cpu"],
            "time in copies": cell["copy_share"],
            "same steps": str(cell["same_schedule_as_free"]),
            "recompute's time to next token / ours": cell["resume_gain"],
            "in steps": cell["resume_gain_steps"],
            "ITL p99 / recompute's": cell["itl_p99_to_recompute"],
        }
        for cell in cells
    ]


def budget_rows(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Fallbacks by budget of one model of the scale model."""
    return [{"budget GB per card": gb, "fallbacks": share} for gb, share in model["fallback share by budget"].items()]


def thrash_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Preemptions and waits under steady pressure, in vLLM's scheduler and in ours; waits in steps."""
    return [
        {
            **{name: str(row[name]) for name in ("requests", "scheduling", "pressure", "arm")},
            "preemptions per 1k tokens": 1000 * row["preemptions"] / row["output_tokens"],
            "longest wait": row["longest_wait"],
            "mean wait": row["waited"] / max(1, row["waits"]),
            "steps": row["steps"],
        }
        for row in rows
    ]
