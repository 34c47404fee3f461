"""Options that both commands share: vLLM's parallel sizes and the host."""

from __future__ import annotations

import argparse

from offload_connector.cli.budget import Deployment
from offload_connector.cli.units import positive


def add_parallel_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("deployment (one vLLM instance, as on its command line)")
    group.add_argument("--tensor-parallel-size", "-tp", type=positive, default=1, metavar="N")
    group.add_argument("--pipeline-parallel-size", "-pp", type=positive, default=1, metavar="N")
    group.add_argument("--data-parallel-size", "-dp", type=positive, default=1, metavar="N")
    group.add_argument(
        "--cards-per-host",
        type=positive,
        metavar="N",
        help="cards of this instance on one host; default: all of them",
    )


def deployment(args: argparse.Namespace) -> Deployment:
    """Return the deployment that the options describe."""
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size)
    return Deployment(*sizes, cards_per_host=args.cards_per_host or sizes[0] * sizes[1] * sizes[2])
