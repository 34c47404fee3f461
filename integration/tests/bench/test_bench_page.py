"""The page: tables and plots of whatever reports are there."""

import json
from pathlib import Path

import pytest

from pd_integration.bench import page, record

NEIGHBOURS = {
    "neighbours": 8,
    "rows": [
        {
            "victim tokens": tokens,
            "victim MiB": tokens / 170,
            "p50 ms": 11.0,
            "p50 without": 10.0,
            "p99 ms": 21.0,
            "p99 without": 20.0,
        }
        for tokens in (256, 1024)
    ],
}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.123"), (12345.6, "12,346"), (1234, "1,234"), ("a <b>", "a <b>"), (0.0, "0")],
)
def test_cell_has_three_digits_or_a_dash(value, text: str) -> None:
    assert record.cell(value) == text


def test_report_says_when_and_on_what_it_was_made(tmp_path: Path) -> None:
    data = json.loads(record.write("neighbours", NEIGHBOURS, tmp_path).read_text())
    assert set(data["about"]) >= {"date", "commit", "processor", "cores", "load_average_1min", "versions"}
    assert data["rows"] == NEIGHBOURS["rows"]


def test_page_shows_the_reports_that_are_there(tmp_path: Path) -> None:
    record.write("neighbours", NEIGHBOURS, tmp_path)
    text = page.build(tmp_path).read_text()
    assert "<h2>neighbours</h2>" in text
    assert text.count("<svg") == 1
    assert "<td>1,024</td>" in text
    assert "<h2>decode</h2>" not in text


def test_table_escapes_what_it_shows() -> None:
    assert "<td>a &lt;b&gt;</td>" in page.table("x", [{"arm": "a <b>"}])
