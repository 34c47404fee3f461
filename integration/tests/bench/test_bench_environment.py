"""Importing a benchmark changes nothing: its tests run beside those that start servers."""

import os
import subprocess
import sys

import pytest

CODE = """
import importlib, os, sys
before = dict(os.environ)
importlib.import_module(sys.argv[1])
changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
print(*sorted(name for name in changed if name.startswith("VLLM_LOGGING")))
"""


@pytest.mark.parametrize("part", ["decode", "neighbours", "scale", "scheduler", "thrash"])
def test_importing_a_part_leaves_the_log_level_of_servers_alone(part: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    command = [sys.executable, "-c", CODE, f"pd_integration.bench.{part}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


QUIET = """
from vllm.logger import init_logger
from pd_integration.bench import record
from recompute_scheduler.testing import make_config
record.log_errors_only()
make_config()
init_logger("vllm.some.module").error("an error")
"""


def test_a_part_that_runs_logs_errors_only() -> None:
    """vLLM tells much of itself when it is configured, and of every preemption later."""
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=120, check=True)
    logged = done.stdout + done.stderr
    assert "an error" in logged
    assert "INFO" not in logged
    assert "WARNING" not in logged
