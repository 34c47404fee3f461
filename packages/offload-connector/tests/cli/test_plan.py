import json
import subprocess
import sys

import pytest
from cli.configs import CONFIGS

from offload_connector.cli import main
from offload_connector.cli.budget import Budget, Deployment
from offload_connector.cli.layout import make_layout
from offload_connector.cli.model import read_model

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 163840,
}
LATENT = 512 + 64
GIB = 1 << 30


@pytest.fixture
def save(tmp_path):
    """Return a function that writes a config.json and returns its directory."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def plan(capsys):
    """Return a function that runs the command with --json and returns (exit status, report)."""

    def run(*argv):
        status = main(["plan", *map(str, argv), "--json"])
        out = capsys.readouterr().out
        return status, json.loads(out) if out else None

    return run


def test_deepseek_v3_takes_70_kb_a_token_on_every_rank(plan, save):
    status, report = plan("--model", save(DEEPSEEK_V3), "-tp", 8, "-dp", 2, "--max-model-len", 32768)

    assert status == 0
    assert report["kv_cache"]["bytes_per_token_per_rank"] == 61 * LATENT * 2 == 70272
    assert report["kv_cache"]["bytes_per_block_per_rank"] == 128 * 70272
    assert report["ranks"] == 16
    budget = report["budget"]
    assert budget["cpu_bytes_to_use_per_rank"] == 16 * GIB
    assert budget["cpu_bytes_to_use"] == 256 * GIB
    assert budget["blocks"] == 16 * GIB // (128 * 70272)
    assert budget["requests_per_engine"] == budget["blocks"] // 256
    assert budget["tokens_per_engine"] == budget["blocks"] * 128
    assert report["host"]["ram_bytes"] == 16 * (16 * GIB + 128 * 70272)
    assert report["host"]["docker_shm_size"] == "1024g"
    assert any("8 ranks hold the same KV heads" in note for note in report["notes"])


def test_a_draft_layer_adds_its_own_kv(plan, save):
    _, report = plan("--model", save(DEEPSEEK_V3), "--draft-layers", 1, "--max-model-len", 32768)
    assert report["kv_cache"]["bytes_per_token_per_rank"] == 62 * LATENT * 2


def test_the_budget_for_so_many_requests_is_exact(plan, save):
    args = ("--model", save(CONFIGS["llama"]), "--requests", 3, "--tokens", 1000)
    status, report = plan(*args)

    block = 128 * 5 * 4 * 2 * 32 * 2  # tokens, layers, heads, K and V, head size, bytes
    assert status == 0
    assert report["budget"]["cpu_bytes_to_use_per_rank"] == 3 * 8 * block
    assert report["budget"]["requests_per_engine"] == 3
    _, report = plan("--model", args[1], "--tokens", 1000, "--cpu-bytes-per-rank", 3 * 8 * block - 1)
    assert report["budget"]["requests_per_engine"] == 2


def test_kv_heads_fewer_than_ranks_are_replicated(plan, save):
    for tp, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        _, report = plan("--model", save(CONFIGS["llama"]), "-tp", tp)
        assert report["kv_cache"]["bytes_per_token_per_rank"] == 5 * heads * 2 * 32 * 2
        assert bool(report["notes"]) is (tp == 8)


def test_windows_and_states_do_not_grow_with_the_request():
    def blocks(name, tokens):
        model = read_model(CONFIGS[name])
        return make_layout(model.layers, 32, model.num_positions, 1).blocks(tokens)

    # 3 window layers and 2 full ones make groups of 2, two of them for the windows; a window of 64 tokens touches 3
    # blocks of 32 at most.
    assert [blocks("gpt_oss", tokens) for tokens in (1, 32, 33, 320)] == [3, 3, 6, 10 + 3 + 3]
    # 2 full layers, so groups of 2, three of them for the 6 states.
    model = read_model(CONFIGS["qwen3_next"])
    layout = make_layout(model.layers, 32, model.num_positions, 1)
    assert layout.blocks(10 * layout.block_size) == 10 + 3


def test_each_pipeline_stage_counts_and_the_largest_decides():
    model = read_model(CONFIGS["llama"])
    layout = make_layout(model.layers, 128, model.num_positions, 2)
    first, last = layout.stage_block_bytes
    assert (first, last) == (3 * 128 * 512, 2 * 128 * 512)
    assert Budget(layout, Deployment(1, 2, 1, 2), 10 * first, 128).blocks == 10


def test_vllms_own_numbers_will_do(plan):
    _, report = plan("--bytes-per-block", 8994816, "--block-size", 128, "--max-model-len", 32768, "-tp", 8)
    assert report["model"] is None
    assert report["budget"]["request_bytes_per_rank"] == 256 * 8994816
    memory = ("--kv-cache-memory", "50GiB", "--kv-cache-tokens", 50 * GIB // 70272, "--max-model-len", 32768)
    _, report = plan(*memory, "--num-gpu-blocks", 5960)
    assert report["kv_cache"]["bytes_per_token_per_rank"] == pytest.approx(70272, rel=1e-4)
    assert report["budget"]["share_of_device_blocks"] == pytest.approx(0.32, abs=0.001)


def test_a_budget_that_holds_no_request_is_a_finding(plan, save):
    status, report = plan("--model", save(DEEPSEEK_V3), "--max-model-len", 163840, "--cpu-bytes-per-rank", "1GiB")
    assert status == 1
    assert report["budget"]["requests_per_engine"] == 0
    assert any("holds no request of 163840 tokens" in note for note in report["notes"])


def test_a_budget_below_one_block_is_an_error(capsys):
    numbers = ["--bytes-per-block", "131072", "--block-size", "32", "--max-model-len", "1024"]
    assert main(["plan", *numbers, "--cpu-bytes-per-rank", "131071"]) == 2
    printed = capsys.readouterr()
    assert "131071 holds not even one block: a block of this model takes 131072 bytes" in printed.err
    assert printed.out == ""


def test_several_hosts_share_the_cards(plan, save):
    args = ("--model", save(DEEPSEEK_V3), "-tp", 8, "-dp", 4, "--cards-per-host", 16, "--max-model-len", 32768)
    _, report = plan(*args)
    assert (report["host"]["hosts"], report["host"]["cards"]) == (2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": 2048}, "config.json has index_topk"),
        ({"model_type": "minicpm3"}, "latent attention of the model type minicpm3"),
        ({"kv_lora_rank": None, "model_type": "deepseek_v3"}, "config.json lacks kv_lora_rank"),
        ({"torch_dtype": "float8_e4m3fn"}, "the dtype float8_e4m3fn"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantized KV cache"),
        ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
    ],
)
def test_a_model_that_cannot_be_derived_asks_for_vllms_numbers(change, message, save, capsys):
    config = {key: value for key, value in {**DEEPSEEK_V3, **change}.items() if value is not None}
    assert main(["plan", "--model", save(config)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--bytes-per-block" in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sliding_window": 64}, "a sliding_window but no layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "layers with a sliding window but no sliding_window"),
        ({"layer_types": ["conv"] * 5}, "'conv' in layer_types"),
        ({"layer_types": ["linear_attention"] * 5}, "recurrent states of the model type llama"),
        ({"mamba_d_state": 16}, "recurrent states of the model type llama"),
        ({"v_head_dim": 64}, "v_head_dim of its own"),
        ({"multi_query": True}, "config.json has multi_query"),
    ],
)
def test_an_unknown_variant_of_a_known_model_is_not_guessed(config, message, save, capsys):
    assert main(["plan", "--model", save({**CONFIGS["llama"], **config})]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give one source"),
        (["--model", "/none", "--bytes-per-block", "1"], "give one source"),
        (["--model", "/none"], "cannot read /none"),
        (["--bytes-per-block", "1024"], "give --max-model-len"),
        (["--kv-cache-memory", "1GiB", "--max-model-len", "10"], "go together"),
        (["--bytes-per-block", "1", "--max-model-len", "10", "--tokens", "11"], "no request is so long"),
        (
            ["--bytes-per-block", "1", "--max-model-len", "10", "--requests", "1", "--cpu-bytes-per-rank", "1"],
            "keep one of them",
        ),
    ],
)
def test_contradicting_options_are_wrong_usage(argv, message, capsys):
    assert main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["16GB", "-1", "0", "1.5", "16 gigs", ""])
def test_a_size_that_is_none_is_wrong_usage(value, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", f"--cpu-bytes-per-rank={value}"])
    assert stop.value.code == 2
    assert "bytes" in capsys.readouterr().err


def test_heads_that_do_not_divide_are_wrong_usage(save, capsys):
    assert main(["plan", "--model", save(CONFIGS["llama"]), "-tp", "3"]) == 2
    assert "--tensor-parallel-size 3 does not divide" in capsys.readouterr().err


def test_more_stages_than_layers_are_wrong_usage(save, capsys):
    assert main(["plan", "--model", save(CONFIGS["llama"]), "-pp", "6"]) == 2
    assert "only 5 layers" in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    assert "offload-connector plan --model" in capsys.readouterr().out


def test_the_text_can_be_pasted_and_passes_the_check(save):
    command = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from offload_connector.cli import main; raise SystemExit(main())"
    )
    model = save(DEEPSEEK_V3)
    done = subprocess.run(
        [sys.executable, "-c", command, "plan", "--model", model, "-tp", "8", "--max-model-len", "32768"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    beside, alone, flag = (part.split("'")[1] for part in done.stdout.split("\n--")[1:])
    for transfer in (beside, alone):
        argv = ["check", "--no-host", "-tp", "8", "--kv-transfer-config", transfer, "--additional-config", flag]
        done = subprocess.run([sys.executable, "-c", command, *argv], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "ok\n")
