"""The preflight: each failure is one line that names what is wrong and the fix, and nothing starts then."""

import os
import resource
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import preflight

GIB = 1 << 30
DRIVER_INFO = "Version=25.5.0\nascendhal_version=7.35.23\ncompatible_version=[V100R001C30],[V100R001C13]\n"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The root of an A3 host with 16 devices and 2 TiB of free RAM."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    for name in [f"davinci{number}" for number in range(16)] + ["davinci_manager", "devmm_svm", "hisi_hdc"]:
        (tmp_path / "dev" / name).touch()
    driver = tmp_path / "usr/local/Ascend/driver"
    driver.mkdir(parents=True)
    (driver / "version.info").write_text(DRIVER_INFO)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {2 * GIB} kB\n")
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000000000\nVmLck:\t0 kB\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memlock(monkeypatch, resource.RLIM_INFINITY)
    limit_shm(monkeypatch, 1024 * GIB)


def limit_memlock(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (nbytes, nbytes))


def limit_shm(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    def statvfs(path: Path) -> os.statvfs_result:
        assert str(path).endswith("dev/shm")
        return os.statvfs_result((4096, 4096, nbytes // 4096, nbytes // 4096, nbytes // 4096, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)


def run(host: Path, capfd: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[str]]:
    devices = ",".join(map(str, range(16)))
    argv = ["--root", str(host), "--devices", devices, "--cards", "16", "--cpu-bytes-per-rank", str(16 * GIB)]
    status = preflight.main([*argv, "--model", str(host / "model"), *more])
    return status, capfd.readouterr().err.splitlines()


def test_a_fit_host_passes(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(host, capfd) == (0, [])


def test_only_what_is_asked_for_is_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--root", str(tmp_path)]) == 0
    assert "nothing to check" in capfd.readouterr().out


def test_shm_must_hold_the_budget_of_all_cards(
    host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_shm(monkeypatch, 256 * GIB)
    assert run(host, capfd) == (0, [])
    limit_shm(monkeypatch, 256 * GIB - 4096)
    status, (line,) = run(host, capfd)
    assert status == 1
    assert "shared memory: /dev/shm has 256.00 GiB free, 256.00 GiB are needed" in line
    assert "--shm-size=256g or more (A3 with 16 GiB a card: --shm-size=1024g)" in line


def test_shm_can_be_asked_for_without_a_budget(
    host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_shm(monkeypatch, 64 << 20)
    assert preflight.main(["--root", str(host), "--shm", str(65 << 20)]) == 1
    assert "--shm-size=128m" in capfd.readouterr().err


def test_no_shm_at_all(host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (host / "dev/shm").rmdir()
    assert preflight.main(["--root", str(host), "--shm", "1"]) == 1
    assert "/dev/shm is not mounted" in capfd.readouterr().err


def test_memlock(host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memlock(monkeypatch, 8 << 20)
    status, (line,) = run(host, capfd)
    assert status == 1
    assert "memlock" in line
    assert "256.00 GiB are to be pinned" in line
    assert "--ulimit memlock=-1:-1" in line


def test_free_ram(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (host / "proc/meminfo").write_text(f"MemAvailable: {255 << 20} kB\n")
    status, (line,) = run(host, capfd)
    assert status == 1
    assert "host memory" in line
    assert "1.00 GiB short; lower the budget" in line


@pytest.mark.parametrize("missing", [["davinci7"], ["hisi_hdc"], ["davinci0", "davinci15", "devmm_svm"]])
def test_missing_devices_are_named(host: Path, capfd: pytest.CaptureFixture[str], missing: list[str]) -> None:
    for name in missing:
        (host / "dev" / name).unlink()
    status, (line,) = run(host, capfd)
    assert status == 1
    assert f"{len(missing)} of 19 Ascend devices are missing" in line
    assert line.endswith(" ".join(f"--device /dev/{name}" for name in missing))


def test_fewer_devices_than_cards(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, (line,) = run(host, capfd, "--devices", "0,1")
    assert status == 1
    assert "2 devices for 16 cards" in line


@pytest.mark.parametrize("found", ["25.5.0", "25.5.rc1.b010", "26.0.RC1", "100.0"])
def test_new_enough_drivers(host: Path, capfd: pytest.CaptureFixture[str], found: str) -> None:
    (host / preflight.DRIVER).write_text(f"Version={found}\n")
    assert run(host, capfd) == (0, [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Version=24.1.0.3\n", "the Ascend driver is 24.1.0.3, 25.5 or newer is needed; update driver and firmware"),
        ("package_version=25.5\n", "no line like Version=25.5.0"),
        ("Version=V100R001\n", "no line like Version=25.5.0"),
        (None, "start the container with -v /usr/local/Ascend/driver/version.info:"),
    ],
)
def test_driver(host: Path, capfd: pytest.CaptureFixture[str], content: str | None, said: str) -> None:
    path = host / preflight.DRIVER
    path.unlink() if content is None else path.write_text(content)
    status, (line,) = run(host, capfd)
    assert status == 1
    assert said in line


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--min-driver", "new"), "'new' is not a version; write it like 25.5"),
        (("--devices", "0-7"), "'0-7' is not a list of device numbers; write it like 0,1,2"),
    ],
)
def test_wrong_usage(host: Path, capfd: pytest.CaptureFixture[str], option: tuple[str, str], said: str) -> None:
    with pytest.raises(SystemExit) as usage:
        run(host, capfd, *option)
    assert usage.value.code == 2
    assert said in capfd.readouterr().err


def test_no_model(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (host / "model/config.json").unlink()
    status, (line,) = run(host, capfd)
    assert status == 1
    assert f"there is no {host}/model/config.json" in line
    assert f"-v DIR:{host}/model:ro" in line


def test_weights_that_only_somebody_else_may_read(
    host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "model/model.safetensors").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path.suffix != ".safetensors")
    status, (line,) = run(host, capfd)
    assert status == 1
    assert f"can't read model.safetensors in {host}/model" in line
    assert f"readable for user {os.getuid()}" in line


def test_every_failure_has_its_own_line(
    host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memlock(monkeypatch, 0)
    limit_shm(monkeypatch, 64 << 20)
    (host / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    (host / "dev/davinci3").unlink()
    (host / preflight.DRIVER).unlink()
    (host / "model/config.json").unlink()
    status, lines = run(host, capfd)
    assert status == 1
    assert [line.split(": ")[1] for line in lines] == [
        f"FAILED {name}" for name in ("host memory", "shared memory", "memlock", "devices", "driver", "model")
    ]


def test_the_command_starts_only_on_a_fit_host(
    host: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda file, argv: started.append(argv))
    command = ["python3", "-m", "server", "--port", "8200"]
    (host / "dev/davinci0").rename(host / "dev/gone")
    assert run(host, capfd, "--", *command)[0] == 1
    assert started == []
    (host / "dev/gone").rename(host / "dev/davinci0")
    run(host, capfd, "--", *command)
    assert started == [command]
