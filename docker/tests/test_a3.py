"""The A3 files, as far as they can be seen without a device: what they would start, with which options."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

A3 = Path(__file__).parents[1] / "a3"
GUIDE_DEVICES = [f"/dev/davinci{number}" for number in range(16)]
GUIDE_DEVICES += ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
GUIDE_MOUNTS = [
    "/usr/local/dcmi",
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
]
REQUIRED = {"VLLM_ASCEND_VERSION": "0.32.0", "MODEL_DIR": "/data/model"}


@pytest.fixture
def run(tmp_path: Path):
    """Run a script of docker/a3, with a recorder in place of `docker` and `python3`: its arguments and environment."""
    for name in ("docker", "python3"):
        recorder = tmp_path / name
        recorder.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\nprintf "\\n"\nenv -0\n')
        recorder.chmod(0o755)

    def run(script: str, *arguments: str, **settings: str) -> tuple[list[str], dict[str, str]]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **settings}
        command = [str(A3 / script), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        vector, _, variables = done.stdout.partition("\n")
        pairs = (pair.partition("=") for pair in variables.split("\0") if pair)
        return vector.split("\0")[:-1], {name: value for name, _, value in pairs}

    return run


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_decode_is_started_as_in_the_guide(run) -> None:
    argv, environment = run("serve.sh", "decode", MODEL="/path/to/model")
    assert json.loads(option(argv, "--additional-config")) == {"recompute_scheduler_enable": True}
    transfer = json.loads(option(argv, "--kv-transfer-config"))
    one = {"dp_size": 1, "tp_size": 1}
    mooncake = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_consumer",
        "kv_port": "28000",
        "kv_connector_extra_config": {"prefill": one, "decode": one},
    }
    offload = {
        "kv_connector": "RecomputeCPUOffloadConnector",
        "kv_connector_module_path": "offload_connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": 17179869184},
    }
    assert transfer == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [mooncake, offload]},
    }
    server = argv[argv.index("--") + 1 :]
    assert server[:5] == ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/path/to/model"]
    assert {"--trust-remote-code", "--enforce-eager"} <= set(server)
    values = {name: option(server, name) for name in server if name.startswith("--") and name[2:] != "enforce-eager"}
    assert values["--port"] == "8200"
    assert values["--max-model-len"] == "32768"
    assert values["--block-size"] == "128"
    assert values["--max-num-batched-tokens"] == "4096"
    assert values["--tensor-parallel-size"] == values["--data-parallel-size"] == "1"
    assert environment["ASCEND_RT_VISIBLE_DEVICES"] == "8,9,10,11,12,13,14,15"


def test_the_preflight_comes_first_and_knows_the_cards_and_the_budget(run) -> None:
    argv, _ = run("serve.sh", "decode", DECODE_DP="2", DECODE_TP="4", CPU_BYTES_PER_RANK="1000", MIN_DRIVER="26")
    preflight = argv[: argv.index("--")]
    assert preflight[0].endswith("preflight.py")
    assert option(preflight, "--cards") == "8"
    assert option(preflight, "--cpu-bytes-per-rank") == "1000"
    assert option(preflight, "--min-driver") == "26"
    assert option(preflight, "--devices") == "8,9,10,11,12,13,14,15"


def test_prefill_is_a_plain_producer(run) -> None:
    argv, _ = run("serve.sh", "prefill", PREFILL_TP="8", DECODE_DP="8")
    transfer = json.loads(option(argv, "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("MooncakeConnectorV1", "kv_producer")
    assert transfer["kv_connector_extra_config"]["prefill"] == {"dp_size": 1, "tp_size": 8}
    assert transfer["kv_connector_extra_config"]["decode"] == {"dp_size": 8, "tp_size": 1}
    assert "--additional-config" not in argv
    assert option(argv, "--cpu-bytes-per-rank") == "0"


def test_one_host_listens_on_loopback_and_two_on_the_addresses_given(run) -> None:
    argv, environment = run("serve.sh", "prefill")
    assert option(argv, "--host") == "127.0.0.1"
    assert "VLLM_HOST_IP" not in environment
    argv, environment = run("serve.sh", "prefill", PREFILL_HOST="10.0.0.1")
    assert option(argv, "--host") == "10.0.0.1"
    assert environment["VLLM_HOST_IP"] == environment["HCCL_IF_IP"] == "10.0.0.1"
    argv, _ = run("serve.sh", "proxy", PREFILL_HOST="10.0.0.1", DECODE_HOST="10.0.0.2")
    assert option(argv, "--prefill") == "http://10.0.0.1:8100"
    assert option(argv, "--decode") == "http://10.0.0.2:8200"
    assert option(argv, "--host") == "127.0.0.1"


def test_the_proxy_takes_our_options(run) -> None:
    from pd_integration.proxy.__main__ import parse_args

    argv, _ = run("serve.sh", "proxy")
    config = parse_args(argv[2:])
    assert config.prefillers[0].bootstrap is None
    assert config.decoders == ("http://127.0.0.1:8200",)


def test_further_arguments_are_passed_on(run) -> None:
    argv, _ = run("serve.sh", "decode", "--num-gpu-blocks-override", "100")
    assert argv[-2:] == ["--num-gpu-blocks-override", "100"]


def test_the_suite_can_have_decode_run_short_of_blocks(run) -> None:
    argv, _ = run("serve.sh", "decode")
    assert "--num-gpu-blocks-override" not in argv
    argv, _ = run("serve.sh", "decode", DECODE_BLOCKS="48")
    assert option(argv, "--num-gpu-blocks-override") == "48"
    argv, _ = run("serve.sh", "suite", DECODE_DP="2", DECODE_TP="8")
    assert option(argv, "--platform") == "a3"
    assert option(argv, "--ranks") == "16"


def test_an_unknown_role_is_refused() -> None:
    done = subprocess.run([str(A3 / "serve.sh"), "both"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "usage: serve.sh prefill|decode|proxy|suite" in done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_gets_all_devices_mounts_and_shared_memory(run, role: str) -> None:
    argv, _ = run("run-a3.sh", role, **REQUIRED)
    devices = [argv[at + 1] for at, word in enumerate(argv) if word == "--device"]
    mounts = [argv[at + 1] for at, word in enumerate(argv) if word == "--volume"]
    assert devices == GUIDE_DEVICES
    assert mounts == [*(f"{path}:{path}:ro" for path in GUIDE_MOUNTS), "/data/model:/model:ro"]
    assert {"--shm-size=1024g", "--net=host", "memlock=-1:-1"} <= set(argv)
    assert argv[-2:] == ["pd-a3:0.32.0", role]


def test_settings_reach_the_container(run) -> None:
    settings = {"PREFILL_HOST": "10.0.0.1", "DECODE_DP": "16", "CPU_BYTES_PER_RANK": "1"}
    argv, _ = run("run-a3.sh", "decode", "--max-num-seqs", "8", **REQUIRED, **settings, SHM_SIZE="64g")
    passed = [argv[at + 1] for at, word in enumerate(argv) if word == "--env"]
    assert sorted(passed) == sorted(settings)
    assert "--shm-size=64g" in argv
    assert argv[-3:] == ["decode", "--max-num-seqs", "8"]


def test_proxy_and_suite_get_no_device(run) -> None:
    for role in ("proxy", "suite"):
        argv, _ = run("run-a3.sh", role, **REQUIRED)
        assert "--device" not in argv
        assert "--volume" not in argv


def test_the_compose_file_says_the_same_as_the_script(run) -> None:
    services = yaml.safe_load((A3 / "compose.yaml").read_text())["services"]
    for role in ("prefill", "decode"):
        service = services[role]
        assert service["devices"] == GUIDE_DEVICES
        assert service["volumes"][:-1] == [f"{path}:{path}:ro" for path in GUIDE_MOUNTS]
        assert service["network_mode"] == "host"
        assert service["shm_size"] == "${SHM_SIZE:-1024g}"
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        assert service["command"] == [role]
    settings = dict.fromkeys(services["decode"]["environment"], "1")
    argv, _ = run("run-a3.sh", "decode", **REQUIRED, **settings)
    assert {argv[at + 1] for at, word in enumerate(argv) if word == "--env"} == settings.keys()
