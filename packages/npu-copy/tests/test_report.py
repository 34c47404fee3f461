from __future__ import annotations

import re
import subprocess
import sys

import pytest

from npu_copy import __main__


def test_the_report_names_backend_limits_and_bandwidth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(__main__, "BUDGET_S", 0.1)
    monkeypatch.setattr(sys, "argv", ["npu_copy", "--device", "cpu", "--mib", "4"])
    __main__.main()
    out = capsys.readouterr().out
    assert re.search(r"^device +cpu$", out, re.M)
    assert re.search(r"GiB  host RAM \(MemAvailable\)$", out, re.M)
    assert re.search(r"backend cpu \((native|memmove)\), pageable host memory", out)
    for piece in (8, 64, 256, 1024):
        assert re.search(rf"^ +{piece} KiB +\d+\.\d +\d+\.\d$", out, re.M)


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "npu_copy", "--mib", "0"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "free host memory" in result.stdout
    assert "median GB/s" not in result.stdout
    bad = subprocess.run([*command[:-1], "-1"], capture_output=True, text=True, timeout=120)
    assert (bad.returncode, "must not be negative, got -1" in bad.stderr) == (2, True)
