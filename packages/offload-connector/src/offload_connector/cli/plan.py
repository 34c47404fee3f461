"""`offload-connector plan`: how much host memory to give, and what it holds."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from offload_connector.cli.budget import Budget, Deployment
from offload_connector.cli.layout import Group, Kind, Layer, Layout, make_layout
from offload_connector.cli.model import DTYPE_BYTES, KV_DTYPE_BYTES, Model, load_config, read_model
from offload_connector.cli.parallel import add_parallel_options, deployment
from offload_connector.cli.snippets import additional_config, kv_transfer_config, offload_entry
from offload_connector.cli.units import natural, parse_bytes, positive, show_bytes

DEFAULT_PER_RANK = 16 << 30

EXAMPLE = """\
examples:
  offload-connector plan --model /models/Qwen3-32B -tp 4 -dp 2 --max-model-len 32768 --cpu-bytes-per-rank 16GiB
  offload-connector plan --model /models/DeepSeek-V3 -tp 8 -dp 2 --requests 12 --tokens 16384 --draft-layers 1
  offload-connector plan --bytes-per-block 8994816 --block-size 128 --max-model-len 32768 -tp 8 --json

exit status: 0 fine, 1 the budget holds not even one such request, 2 wrong usage or a model that cannot be derived
"""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-commands."""
    parser = commands.add_parser(
        "plan",
        help="bytes per token and block, what a budget holds, what a host needs, and the JSON to paste",
        description="Work out the host memory for the KV cache of preempted requests.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    source = parser.add_argument_group("the model, or vLLM's own numbers")
    source.add_argument("--model", metavar="PATH", help="local model directory or its config.json")
    source.add_argument("--dtype", default="auto", choices=("auto", *DTYPE_BYTES))
    source.add_argument("--kv-cache-dtype", default="auto", choices=("auto", *KV_DTYPE_BYTES))
    source.add_argument("--mamba-ssm-cache-dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"))
    source.add_argument("--draft-layers", type=natural, default=0, metavar="N", help="layers of an MTP or EAGLE draft")
    source.add_argument("--num-speculative-tokens", type=natural, default=0, metavar="N")
    source.add_argument("--bytes-per-block", type=positive, metavar="B", help="of one rank, from the connector's log")
    source.add_argument(
        "--kv-cache-groups", type=positive, default=1, metavar="N", help="full-attention groups, with --bytes-per-block"
    )
    source.add_argument("--kv-cache-memory", type=parse_bytes, metavar="BYTES", help="'Available KV cache memory'")
    source.add_argument("--kv-cache-tokens", type=positive, metavar="N", help="'KV cache size: N tokens'")
    source.add_argument("--block-size", type=positive, default=128, metavar="N", help="tokens per block; default: 128")
    source.add_argument("--num-gpu-blocks", type=positive, metavar="N", help="device blocks, to compare with")
    source.add_argument("--max-model-len", type=positive, metavar="N", help="default: what config.json says")
    add_parallel_options(parser)
    budget = parser.add_argument_group("the budget: given, or worked out")
    budget.add_argument("--cpu-bytes-per-rank", type=parse_bytes, metavar="BYTES", help="default: 16GiB")
    budget.add_argument("--requests", type=positive, metavar="N", help="preempted requests that one engine shall keep")
    budget.add_argument("--tokens", type=positive, metavar="N", help="tokens of each; default: --max-model-len")
    paste = parser.add_argument_group("the JSON to paste")
    paste.add_argument("--pd-connector", default="MooncakeConnectorV1", metavar="NAME", help="brings KV from Prefill")
    paste.add_argument("--prefill-tensor-parallel-size", type=positive, default=1, metavar="N")
    paste.add_argument("--prefill-data-parallel-size", type=positive, default=1, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Raises:
        ValueError: options that contradict each other or do not suffice, or a model that cannot be derived.
    """
    host = deployment(args)
    layout, model, max_model_len = _layout(args, host)
    tokens = args.tokens or max_model_len
    if tokens > max_model_len:
        raise ValueError(f"--tokens {tokens} is more than --max-model-len {max_model_len}: no request is so long")
    if args.requests and args.cpu_bytes_per_rank:
        raise ValueError("--requests works a budget out and --cpu-bytes-per-rank gives one; keep one of them")
    if args.requests:
        budget = Budget.for_requests(layout, host, args.requests, tokens)
    else:
        budget = Budget(layout, host, args.cpu_bytes_per_rank or DEFAULT_PER_RANK, tokens)
    if not budget.blocks:
        raise ValueError(
            f"--cpu-bytes-per-rank {budget.per_rank} holds not even one block: a block of this model takes "
            f"{layout.block_bytes} bytes on a rank, a request of {tokens} tokens {budget.request_bytes}"
        )
    report = _report(args, budget, model, max_model_len)
    print(json.dumps(report, indent=2) if args.json else _text(report, budget))
    return 0 if budget.requests else 1


def _layout(args: argparse.Namespace, host: Deployment) -> tuple[Layout, Model | None, int]:
    given = [args.model, args.bytes_per_block, args.kv_cache_memory or args.kv_cache_tokens]
    if sum(source is not None for source in given) != 1:
        raise ValueError(
            "give one source of the block's size: --model PATH, or --bytes-per-block B, or --kv-cache-memory BYTES and "
            "--kv-cache-tokens N"
        )
    if args.model:
        config = load_config(args.model)
        model = read_model(
            config,
            tp=host.tp,
            dtype=args.dtype,
            kv_dtype=args.kv_cache_dtype,
            draft_layers=args.draft_layers,
            draft_tokens=args.num_speculative_tokens,
            state_dtype=args.mamba_ssm_cache_dtype,
        )
        if host.pp > model.num_positions:
            raise ValueError(f"--pipeline-parallel-size {host.pp}: the model has only {model.num_positions} layers")
        text = {**config, **(config.get("text_config") or {})}
        max_model_len = args.max_model_len or text.get("max_position_embeddings")
        if not max_model_len:
            raise ValueError("config.json has no max_position_embeddings; give --max-model-len")
        return make_layout(model.layers, args.block_size, model.num_positions, host.pp), model, max_model_len
    if not args.max_model_len:
        raise ValueError("without --model the longest request is not known; give --max-model-len")
    block_bytes = args.bytes_per_block
    if block_bytes is None:
        if not args.kv_cache_memory or not args.kv_cache_tokens:
            raise ValueError("--kv-cache-memory and --kv-cache-tokens go together: both are in vLLM's start-up log")
        block_bytes = args.kv_cache_memory * args.block_size // args.kv_cache_tokens
    group = Group(Kind.FULL, (Layer(Kind.FULL, block_bytes // args.block_size, 0),))
    return Layout(args.block_size, (group,) * args.kv_cache_groups, (block_bytes,)), None, args.max_model_len


def _report(args: argparse.Namespace, budget: Budget, model: Model | None, max_model_len: int) -> dict[str, Any]:
    layout, host = budget.layout, budget.deployment
    prefill = (args.prefill_tensor_parallel_size, args.prefill_data_parallel_size)
    notes = []
    if layout.block_size != args.block_size:
        notes.append(
            f"a recurrent state needs a block of {layout.block_size} tokens, not {args.block_size}; if vLLM logs "
            "another 'Setting attention block size to N tokens', give that N as --block-size"
        )
    if model is not None and model.replicas > 1:
        notes.append(f"{model.replicas} ranks hold the same KV heads; each keeps its own copy, on the host as well")
    if not budget.requests:
        need = budget.request_bytes
        notes.append(f"the budget holds no request of {budget.tokens} tokens; it takes {show_bytes(need)} per rank")
    return {
        "model": model.name if model else None,
        "kv_cache": {
            "block_size": layout.block_size,
            "groups": [{"kind": group.kind.value, "layers": len(group.layers)} for group in layout.groups],
            "bytes_per_token_per_rank": budget.token_bytes,
            "bytes_per_block_per_rank": layout.block_bytes,
            "bytes_per_block_by_pipeline_stage": list(layout.stage_block_bytes),
        },
        "ranks": host.ranks,
        "budget": {
            "cpu_bytes_to_use_per_rank": budget.per_rank,
            "cpu_bytes_to_use": budget.total,
            "blocks": budget.blocks,
            "request_tokens": budget.tokens,
            "request_blocks": layout.blocks(budget.tokens),
            "request_bytes_per_rank": budget.request_bytes,
            "requests_per_engine": budget.requests,
            "requests_of_max_model_len_per_engine": budget.blocks // layout.blocks(max_model_len),
            "tokens_per_engine": budget.held_tokens,
            "share_of_device_blocks": round(budget.blocks / args.num_gpu_blocks, 3) if args.num_gpu_blocks else None,
        },
        "host": {
            "hosts": host.hosts,
            "cards": host.busiest_host_cards,
            "ram_bytes": budget.host_bytes,
            "shm_bytes": budget.host_bytes,
            "docker_shm_size": f"{budget.shm_size}g",
        },
        "notes": notes,
        "kv_transfer_config": kv_transfer_config(budget.per_rank, host, args.pd_connector, *prefill),
        "standalone_kv_transfer_config": offload_entry(budget.per_rank),
        "additional_config": additional_config(),
    }


def _text(report: dict[str, Any], budget: Budget) -> str:
    cache, held, needs, host = report["kv_cache"], report["budget"], report["host"], budget.deployment
    groups = ", ".join(f"{group['kind']} x {group['layers']} layers" for group in cache["groups"])
    rows = [
        ("model", f"{report['model'] or 'by vLLM numbers'}: {groups}"),
        ("deployment", f"tp {host.tp} x pp {host.pp} x dp {host.dp} = {host.ranks} ranks, {needs['hosts']} host(s)"),
        ("one token", f"{cache['bytes_per_token_per_rank']:,} bytes on each rank"),
        ("one block", f"{cache['block_size']} tokens, {show_bytes(cache['bytes_per_block_per_rank'])} on each rank"),
        ("budget", f"{show_bytes(held['cpu_bytes_to_use_per_rank'])} per rank = {held['blocks']:,} blocks"),
        ("one request", f"{held['request_tokens']:,} tokens, {show_bytes(held['request_bytes_per_rank'])} per rank"),
        ("an engine holds", f"{held['requests_per_engine']:,} such requests, {held['tokens_per_engine']:,} tokens"),
        ("each host needs", f"{show_bytes(needs['ram_bytes'])} of free RAM for {needs['cards']} card(s)"),
        ("/dev/shm", f"the same; docker run --shm-size={needs['docker_shm_size']} (a limit, nothing is taken by it)"),
    ]
    if held["share_of_device_blocks"] is not None:
        rows.append(("of the device", f"{held['share_of_device_blocks']:.1%} of its KV cache blocks"))
    lines = [f"{name:<16} {value}" for name, value in rows]
    lines += [f"note: {note}" for note in report["notes"]]
    for title, key, option, indent in (
        ("beside the connector that brings KV from Prefill", "kv_transfer_config", "--kv-transfer-config", 2),
        ("or alone, to try the path on a Decode node", "standalone_kv_transfer_config", "--kv-transfer-config", 2),
        ("and with either", "additional_config", "--additional-config", None),
    ):
        lines += ["", f"# {title}", f"{option} {shlex.quote(json.dumps(report[key], indent=indent))}"]
    return "\n".join(lines)
