"""Every `hatch run ...` that the documentation and the sources name is one that hatch finds."""

import re
from pathlib import Path
from typing import Any

import pytest

from pd_integration.bench.__main__ import PARTS

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", "docs/**/*.md", "packages/**/*.md", "packages/**/*.py", "integration/**/*.md", "integration/**/*.py")
FILES = [path for place in PLACES for path in ROOT.glob(place) if path != Path(__file__)]
COMMAND = re.compile(r"hatch run ([a-z0-9-]+)(?::([a-z0-9-]+))?")


def commands() -> set[tuple[str, str]]:
    """(script, "") and (environment, script): to hatch, what stands before a colon is an environment."""
    return {match for path in FILES for match in COMMAND.findall(path.read_text(encoding="utf-8"))}


def test_there_are_commands() -> None:
    assert {("test", ""), ("bench", ""), ("sim", "mutations")} <= commands()


@pytest.mark.parametrize(("first", "second"), sorted(commands() - {("python", "")}))
def test_command_is_there(first: str, second: str, hatch_envs: dict[str, Any]) -> None:
    environment, script = (first, second) if second else ("default", first)
    assert script in hatch_envs[environment]["scripts"]


def test_every_part_of_the_benchmarks_can_be_run_alone(hatch_envs: dict[str, Any]) -> None:
    assert {"copy", *PARTS} == hatch_envs["bench"]["scripts"].keys()
