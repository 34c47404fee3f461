"""The runner of the version matrix, with something else in hatch's place."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pd_integration import matrix
from pd_integration.matrix import ENVIRONMENTS, PARTS, Outcome, run_part, table
from pd_integration.matrix.install import needed


def fake_hatch(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "hatch.py"
    script.write_text(f"import sys, os, time\n{body}\n")
    return [sys.executable, str(script)]


def test_every_environment_and_script_is_in_hatch_toml(hatch_envs: dict[str, Any]) -> None:
    made = {"default", *(f"vllm.{row}" for axis in hatch_envs["vllm"]["matrix"] for row in axis["version"])}
    assert set(ENVIRONMENTS.values()) <= made
    for env in ("default", "vllm"):
        assert {*PARTS, "prepare"} <= set(hatch_envs[env]["scripts"])


@pytest.mark.parametrize(("code", "ok"), [(0, True), (3, False)])
def test_a_part_is_as_its_exit_status_says(tmp_path: Path, code: int, ok: bool) -> None:
    hatch = fake_hatch(tmp_path, f"print('said', *sys.argv[1:]); sys.exit({code})")
    outcome = run_part(hatch, "0.28.0", "unit", tmp_path)
    assert outcome.ok is ok
    assert Path(outcome.log).read_text() == "said run vllm.0.28.0:unit\n"


def test_the_nested_hatch_does_not_see_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HATCH_ENV_ACTIVE", "default")
    hatch = fake_hatch(tmp_path, "sys.exit('HATCH_ENV_ACTIVE' in os.environ)")
    assert run_part(hatch, "0.32.0", "demo", tmp_path).ok


def test_a_part_that_does_not_end_fails_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "unit", 1.0)
    child = tmp_path / "child"
    hatch = fake_hatch(tmp_path, f"open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(120)")
    outcome = run_part(hatch, "0.32.0", "unit", tmp_path)
    assert not outcome.ok
    assert not Path(f"/proc/{child.read_text()}").exists()


def test_the_table_has_a_row_for_each_version() -> None:
    outcomes = [Outcome("0.23.0", "unit", True, 61.4, ""), Outcome("0.23.0", "demo", False, 5.0, "")]
    assert table([*outcomes, Outcome("0.28.0", "unit", True, 50.0, "")]).splitlines() == [
        "| vLLM | unit | demo |",
        "| :-- | --: | --: |",
        "| 0.23.0 | ok, 61 s | FAILED, 5 s |",
        "| 0.28.0 | ok, 50 s | - |",
    ]


def test_without_hatch_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(matrix.shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "_base_executable", str(python))
    with pytest.raises(FileNotFoundError, match="pip install hatch"):
        matrix.find_hatch()


def test_what_vllm_needs_is_installed_but_torch_and_its_companions() -> None:
    found = needed(
        [
            "torch==2.11.0+cpu; platform_machine == 'x86_64'",
            "torchvision; platform_machine != 's390x'",
            "transformers>=4.56.0",
            'numba==0.65.0; platform_machine != "s390x"',
            "bench-only; extra == 'bench'",
        ]
    )
    assert found == ["transformers>=4.56.0", 'numba==0.65.0; platform_machine != "s390x"']
