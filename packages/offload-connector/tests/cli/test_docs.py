"""The documentation holds what it says: examples parse, log lines are in the source, names are complete, links lead."""

import ast
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from offload_connector.cli import make_parser
from offload_connector.cli.budget import Deployment
from offload_connector.cli.json_text import read_json
from offload_connector.cli.lint import lint_additional, lint_transfer
from offload_connector.config import KEYS
from offload_connector.metrics import METRICS
from offload_connector.within_step import LOAD_WITHIN_STEP_BYTES
from recompute_scheduler import activation, fallback

ROOT = Path(__file__).parents[4]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "packages/offload-connector/README.md"]
SOURCES = [
    *(ROOT / "packages/offload-connector/src").rglob("*.py"),
    *(ROOT / "packages/recompute-scheduler/src").rglob("*.py"),
    *(ROOT / "packages/npu-copy/src").rglob("*.py"),
]
DEPLOYMENT = Deployment(8, 1, 2, 16)
PASSED_ON = "Recompute offload: ..."
"""An error of npu-copy, logged as it is; its own text is what is explained."""
EXAMPLES = [
    (page, language, text)
    for page in PAGES
    for language, text in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
]


def ids(examples):
    return [f"{page.name}-{number}" for number, (page, *_) in enumerate(examples)]


def assert_clean(value):
    """No errors and no warnings in a value of `--kv-transfer-config` or `--additional-config`."""
    if "kv_connector" in value:
        findings = lint_transfer(value, DEPLOYMENT).findings
    else:
        findings = lint_additional(value)[1]
    assert [str(finding) for finding in findings if finding.level != "note"] == []


def of_language(language):
    return [example for example in EXAMPLES if example[1] == language]


def test_there_are_examples():
    assert len(of_language("json")) >= 5
    assert len(of_language("bash")) >= 8


def test_every_example_has_a_language_that_is_tested():
    assert {language for _, language, _ in EXAMPLES} <= {"json", "bash", "python", "text", ""}
    # Drawings and log lines only.
    assert not any("--" in text and "vllm" in text for _, language, text in EXAMPLES if language in ("", "text"))


@pytest.mark.parametrize("example", of_language("json"), ids=ids(of_language("json")))
def test_json_is_json_and_passes_the_linter(example):
    assert_clean(json.loads(example[2]))


@pytest.mark.parametrize("example", of_language("python"), ids=ids(of_language("python")))
def test_python_runs(example):
    exec(compile(example[2], example[0].name, "exec"), {})


def commands():
    for page, _, text in of_language("bash"):
        lines = re.sub(r"\\\n", " ", text)
        for command in re.findall(r"(?:[^'\n]|'[^']*')+", lines):
            yield page, shlex.split(command, comments=True)


COMMANDS = list(commands())


@pytest.mark.parametrize("command", COMMANDS, ids=ids(COMMANDS))
def test_commands_parse(command):
    _, words = command
    if words[0] == "offload-connector":
        make_parser().parse_args(words[1:])
    elif words[:2] == ["vllm", "serve"]:
        vllm_parser().parse_args(words[3:])
        for option, value in itertools.pairwise(words):
            if option in ("--kv-transfer-config", "--additional-config"):
                parsed, faults = read_json(value, option)
                assert faults == []
                assert_clean(parsed)
    else:
        assert words[0] in ("pip", "docker"), words


def vllm_parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def literals(path):
    """Every string in a source file, `...` where something is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d+)?[sdfr]", "...", node.value)


def log_lines():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    index = (ROOT / "docs/index.md").read_text()
    lines = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    return lines + [line.strip() for line in re.findall(r"^ +(\w.* request \.\.\.)$", index, re.MULTILINE)]


def matches(line, literal):
    """Whether the pieces of a documented line, between its dots, are in the literal in this order."""
    pattern = ".*".join(
        re.escape(piece) for piece in re.split(r"\.\.\.", line.replace("recompute_scheduler_enable:", "...:"))
    )
    return re.search(pattern, literal, re.DOTALL) is not None


LITERALS = [literal for source in SOURCES for literal in literals(source)]


def test_there_are_log_lines():
    assert len(log_lines()) >= 25


@pytest.mark.parametrize("line", log_lines())
def test_every_log_line_is_in_the_source(line):
    assert len(re.sub(r"\W|\.\.\.", "", line)) > 8, "too little text to find"
    assert any(matches(line, literal) for literal in LITERALS)


def logged_problems():
    """The format of every warning and error that the connector and the scheduler log."""
    for source in SOURCES:
        if "npu-copy" in source.parts or "cli" in source.parts:
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("warning", "error")
                and getattr(node.func.value, "id", "") == "logger"
            ):
                yield re.sub(r"%(?:\.\d+)?[sdfr]", "...", node.args[0].value)


@pytest.mark.parametrize("problem", sorted(set(logged_problems()) - {PASSED_ON}))
def test_every_warning_and_error_of_the_log_is_explained(problem):
    assert any(matches(line, problem) for line in log_lines())


def test_every_key_is_in_the_reference():
    text = (ROOT / "docs/configuration.md").read_text()
    for key in (*KEYS, activation.FLAG, fallback.FALLBACK, fallback.MAX_LOCAL_TOKENS):
        assert re.search(rf"^\| `{key}` \|", text, re.MULTILINE), key


def test_every_metric_and_reason_is_explained_and_exists():
    text = (ROOT / "docs/tuning.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    reasons = {
        node.value
        for node in ast.walk(
            ast.parse((ROOT / "packages/offload-connector/src/offload_connector/manager.py").read_text())
        )
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z]+(_[a-z]+)*", node.value)
    }
    assert set(METRICS) <= documented
    assert documented - set(METRICS) <= reasons


def test_the_size_up_to_which_a_load_runs_within_its_step_is_the_managers():
    assert f"Up to {LOAD_WITHIN_STEP_BYTES >> 20} MiB per rank" in (ROOT / "docs/how-it-works.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_options_in_the_text_exist(page):
    ours = {option for action in _actions() for option in action.option_strings}
    vllms = {option for action in vllm_parser()._actions for option in action.option_strings}
    docker = {"--shm-size", "--ulimit"}
    for option in re.findall(r"`(--[a-z-]+)", page.read_text()):
        assert option in ours | vllms | docker, option


def _actions():
    parser = make_parser()
    yield from parser._actions
    for command in parser._subparsers._group_actions[0].choices.values():
        yield from command._actions
