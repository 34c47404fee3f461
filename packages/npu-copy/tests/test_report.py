from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "npu:0"], "--device npu:0: this machine has .*cpu"),
        (["--device", "cpu:7"], "--device cpu:7: this machine has"),
        (["--device", "cpu", "--mib", "1000000000"], "no bandwidth table: .*GiB"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["npu_copy", *arguments])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert re.search(message, f"{ended.value.code} {capsys.readouterr().err}")


def test_the_first_accelerator_is_taken_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(__main__.importlib.util, "find_spec", lambda name: None)
    chosen = {name: str(__main__.choose(name)) for name in (None, "cuda", "cuda:1", "cpu")}
    assert chosen == {None: "cuda:0", "cuda": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}
