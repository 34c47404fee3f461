"""vLLM's own KV cache of a model: its layers are built without weights or processes, as rank r of any world.

`torch.device("meta")` takes the place of memory and a fake process group that of the other ranks.
"""

import contextlib
import json

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs


def kv_cache_configs(directory, config, monkeypatch, *, tp=1, pp=1, **engine_args):
    """Return (vLLM's configuration, its KVCacheConfig for the first rank of each pipeline stage)."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # On a CPU with this instruction set vLLM would change the dtype of recurrent states.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    (directory / "config.json").write_text(json.dumps(config))
    options = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    args = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        **{**options, **engine_args},
    )
    specs = []
    for stage in range(pp):
        vllm_config = args.create_engine_config()
        with _world(monkeypatch, vllm_config, tp * pp, stage * tp, tp, pp):
            specs.append(_layer_specs(vllm_config))
    # The layout that MooncakeConnector asks for; the default for the backends here as well.
    vllm_config.cache_config.kv_cache_layout = "LBHNC"
    return vllm_config, get_kv_cache_configs(vllm_config, specs, [1 << 30] * pp)


def _layer_specs(vllm_config):
    with torch.device("meta"), set_default_torch_dtype(vllm_config.model_config.dtype):
        initialize_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    current_platform.update_block_size_for_backend(vllm_config)
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}


@contextlib.contextmanager
def _world(monkeypatch, vllm_config, size, rank, tp, pp):
    new_group = dist.new_group
    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", lambda ranks=None, *_, **__: new_group(ranks, backend="fake"))
        patch.setattr(parallel_state, "in_the_same_node_as", lambda group, source_rank=0: [False] * size)
        patch.setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False)
        patch.setattr(MessageQueue, "create_from_process_group", staticmethod(lambda *_, **__: None))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            with set_current_vllm_config(vllm_config):
                parallel_state.init_distributed_environment(size, rank, local_rank=0, backend="fake")
                parallel_state.ensure_model_parallel_initialized(tp, pp)
                yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
