"""The planner's arithmetic is vLLM's: blocks, groups and bytes of real model classes, for any rank."""

from math import prod

import pytest
from cli.configs import CONFIGS
from cli.real_vllm import kv_cache_configs
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from offload_connector.cli.layout import Kind, make_layout, pipeline_stages
from offload_connector.cli.model import read_model
from offload_connector.cli.states import state_bytes

KINDS = {Kind.FULL: FullAttentionSpec, Kind.WINDOW: SlidingWindowSpec, Kind.STATE: MambaSpec}
WORLDS = [
    *((name, {}) for name in CONFIGS),
    ("llama", {"tp": 2}),
    ("llama", {"tp": 8}),
    ("llama", {"pp": 2}),
    ("llama", {"pp": 3}),
    ("gpt_oss", {"tp": 2, "pp": 2}),
    ("gemma3", {"pp": 2}),
    ("deepseek_v2", {"tp": 4}),
    ("deepseek_v3", {"pp": 2}),
    ("falcon_h1", {"tp": 2}),
    ("granite", {"tp": 4}),
    ("nemotron_h", {"tp": 2}),
    ("nemotron_h", {"pp": 2}),
    ("qwen3_next", {"tp": 2}),
    ("qwen3_next", {"pp": 2}),
]


@pytest.mark.parametrize(("name", "world"), WORLDS, ids=[f"{name}-{world}" for name, world in WORLDS])
def test_blocks_groups_and_bytes_are_vllms(name, world, tmp_path, monkeypatch):
    vllm_config, stages = kv_cache_configs(tmp_path, CONFIGS[name], monkeypatch, **world)

    model = read_model(CONFIGS[name], tp=world.get("tp", 1))
    start = 16 if "deepseek" in name else 128  # what vLLM's CPU backends begin with
    layout = make_layout(model.layers, start, model.num_positions, world.get("pp", 1))

    assert layout.block_size == vllm_config.cache_config.block_size
    assert list(layout.stage_block_bytes) == [stage.kv_cache_tensors[0].size // stage.num_blocks for stage in stages]
    first = pipeline_stages(model.num_positions, world.get("pp", 1))[0]
    ours = [
        (group.kind.value, group.layers[0].nbytes, sum(layer.position in first for layer in group.layers))
        for group in layout.groups
    ]
    assert sorted(ours) == sorted(described(group) for group in stages[0].kv_cache_groups)


def described(group):
    """What the planner knows of a group: its kind, the bytes per token or state, and its layers on the first stage."""
    spec = group.kv_cache_spec
    kind = next(kind for kind, spec_type in KINDS.items() if isinstance(spec, spec_type))
    nbytes = spec.real_page_size_bytes // (1 if kind is Kind.STATE else spec.block_size)
    return kind.value, nbytes, len(group.layer_names)


@pytest.mark.parametrize("name", ["mistral", "cohere2", "gpt_oss"])
def test_a_window_takes_the_blocks_that_vllm_admits_for_it(name, tmp_path, monkeypatch):
    _, (stage,) = kv_cache_configs(tmp_path, CONFIGS[name], monkeypatch, block_size=32)

    model = read_model(CONFIGS[name])
    layout = make_layout(model.layers, 32, model.num_positions, 1)

    ours = next(group for group in layout.groups if group.kind is Kind.WINDOW)
    spec = next(
        group.kv_cache_spec for group in stage.kv_cache_groups if hasattr(group.kv_cache_spec, "sliding_window")
    )
    assert ours.blocks(1000, 32) == spec.max_admission_blocks_per_request(0, 1000)


@pytest.mark.parametrize("kv_dtype", ["fp8", "float16"])
def test_the_kv_cache_dtype_decides_the_bytes(kv_dtype, tmp_path, monkeypatch):
    _, (stage,) = kv_cache_configs(tmp_path, CONFIGS["llama"], monkeypatch, kv_cache_dtype=kv_dtype)

    model = read_model(CONFIGS["llama"], kv_dtype=kv_dtype)

    layout = make_layout(model.layers, 128, model.num_positions, 1)
    assert layout.block_bytes == stage.kv_cache_tensors[0].size // stage.num_blocks


def test_the_dtype_of_recurrent_states_counts(tmp_path, monkeypatch):
    options = {"mamba_ssm_cache_dtype": "float32", "block_size": 32}
    vllm_config, _ = kv_cache_configs(tmp_path, CONFIGS["granite"], monkeypatch, **options)

    model = read_model(CONFIGS["granite"], state_dtype="float32")

    assert make_layout(model.layers, 32, model.num_positions, 1).block_size == vllm_config.cache_config.block_size


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_drafts_lengthen_the_states_as_in_vllm(drafts, tp):
    def nbytes(shapes):
        return sum(prod(shape) for shape in shapes) * 2

    granite, gated = CONFIGS["granite"], CONFIGS["qwen3_next"]
    width, heads = granite["mamba_expand"] * granite["hidden_size"], granite["mamba_n_heads"]
    theirs = MambaStateShapeCalculator.mamba2_state_shape(tp, width, 1, heads, 32, 32, 4, drafts)
    assert state_bytes(granite, tp, 2, drafts) == nbytes(theirs)
    theirs = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 2, 4, 128, 128, 4, drafts)
    assert state_bytes(gated, tp, 2, drafts) == nbytes(theirs)


@pytest.mark.parametrize(("layers", "stages"), [(n, s) for n in range(1, 12) for s in range(1, 6) if n >= s])
def test_pipeline_stages_are_vllms(layers, stages):
    theirs = [range(*get_pp_indices(layers, stage, stages)) for stage in range(stages)]
    assert pipeline_stages(layers, stages) == theirs
