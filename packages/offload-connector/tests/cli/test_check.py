import json
import subprocess
import sys

import pytest

from offload_connector.cli import main
from offload_connector.cli.check import host_findings
from offload_connector.cli.snippets import offload_entry

GIB = 1 << 30
GOOD = json.dumps(offload_entry(GIB))
FLAG = '{"recompute_scheduler_enable": true}'


@pytest.fixture
def host(tmp_path):
    """Return a function that lays out /proc and /sys of a host with so many bytes free, and returns its root."""

    def make(free, cgroup_limit=None):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {free // 1024} kB\n")
        (tmp_path / "proc/self/status").write_text("VmLck:\t0 kB\nCapEff:\t0000000000000000\n")
        if cgroup_limit is not None:
            (tmp_path / "proc/self/cgroup").write_text("0::/\n")
            (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
            (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(cgroup_limit))
            (tmp_path / "sys/fs/cgroup/memory.current").write_text("0")
        return tmp_path

    return make


def levels(findings):
    return [finding.level for finding in findings if finding.level != "note"]


def test_the_budgets_of_all_cards_must_fit_the_hosts_memory(host):
    root = host(8 * GIB)
    assert levels(host_findings(GIB, 8, "cpu", root)) == []
    (error,) = [f for f in host_findings(GIB + 4096, 8, "cpu", root) if f.level == "error"]
    assert "host RAM" in error.message
    assert "lower the budget" in error.message


def test_a_container_limit_counts(host):
    root = host(64 * GIB, cgroup_limit=4 * GIB)
    (error,) = [f for f in host_findings(GIB, 8, "cpu", root) if f.level == "error"]
    assert "cgroup memory limit" in error.message
    assert "4.00 GiB short" in error.message


def test_shared_memory_counts_for_an_npu_only(host):
    root = host(1 << 60)
    (root / "dev/shm").mkdir(parents=True)
    (error,) = [f for f in host_findings(1 << 55, 16, "npu", root) if f.level == "error"]
    assert "--shm-size=1024g" in error.message
    assert levels(host_findings(1 << 55, 16, "cuda", root)) == []


def test_a_small_memlock_limit_is_noted(host, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    root = host(64 * GIB)
    assert any("ulimit memlock=-1" in f.message for f in host_findings(GIB, 1, "npu", root))
    assert not any("memlock" in f.message for f in host_findings(GIB, 1, "cpu", root))


def check(*argv):
    return main(["check", *argv])


def test_a_good_configuration_is_ok(capsys):
    assert check("--no-host", "--kv-transfer-config", GOOD, "--additional-config", FLAG) == 0
    assert capsys.readouterr().out == "ok\n"


def test_a_missing_flag_is_an_error(capsys):
    assert check("--no-host", "--kv-transfer-config", GOOD) == 1
    assert "--additional-config.recompute_scheduler_enable" in capsys.readouterr().out


def test_a_file_is_read_and_its_trailing_comma_shown(tmp_path, capsys):
    file = tmp_path / "decode.json"
    file.write_text(json.dumps(offload_entry(GIB), indent=2).replace("1073741824", "1073741824,"))
    assert check("--no-host", "--kv-transfer-config", f"@{file}", "--additional-config", FLAG) == 1
    out = capsys.readouterr().out
    assert "error: --kv-transfer-config, line 5, column 44: a comma before '}'" in out
    assert 'write: "cpu_bytes_to_use_per_rank": 1073741824\n' in out


def test_the_report_as_json(capsys):
    assert check("--no-host", "--kv-transfer-config", GOOD[:-1] + ",}", "--additional-config", FLAG, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["cpu_bytes_to_use_per_rank"] == GIB
    (finding,) = report["findings"]
    assert (finding["level"], finding["line"], finding["column"]) == ("error", 1, len(GOOD))


def test_broken_json_of_one_option_says_nothing_of_the_other(capsys):
    assert check("--no-host", "--kv-transfer-config", GOOD[:-1], "--additional-config", FLAG, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["findings"]) == 1


def test_the_host_is_looked_at_with_the_budget_of_the_configuration(capsys):
    huge = json.dumps(offload_entry(1 << 60))
    assert check("--device", "cpu", "--kv-transfer-config", huge, "--additional-config", FLAG) == 1
    assert "error: host memory: cannot allocate" in capsys.readouterr().out


def test_the_budget_can_be_given_alone(capsys):
    assert check("--device", "cpu", "--cpu-bytes-per-rank", "1MiB", "-tp", "2") == 0
    assert "2 card(s) x 1,048,576 bytes (1.00 MiB)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to check"),
        (["--kv-transfer-config", "@/none.json"], "cannot read /none.json"),
        (["--kv-transfer-config", GOOD, "--cpu-bytes-per-rank", "1GiB"], "has the budget already"),
    ],
)
def test_wrong_usage(argv, message, capsys):
    assert check(*argv) == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        check("--help")
    assert stop.value.code == 0
    assert "offload-connector check --kv-transfer-config @decode.json" in capsys.readouterr().out


def test_without_torch_the_host_is_left_out_with_a_warning():
    command = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from offload_connector.cli import main; raise SystemExit(main())"
    )
    argv = [sys.executable, "-c", command, "check", "--cpu-bytes-per-rank", "1GiB"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "npu-copy cannot be imported here" in done.stdout
