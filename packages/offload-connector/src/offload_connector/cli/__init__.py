"""The command `offload-connector`: `plan` the host memory, `check` a host and a configuration.

It needs neither vLLM nor torch, but for the look at the host's memory, which is npu-copy's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from offload_connector import __version__
from offload_connector.cli import check, plan

USAGE = 2
PIPE_CLOSED = 141
"""What a shell reports for a command that SIGPIPE ended."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; each command puts its function into `run`."""
    parser = argparse.ArgumentParser(
        prog="offload-connector",
        description="Tools for RecomputeCPUOffloadConnector: the KV cache of preempted requests, kept on the host.",
        epilog="offload-connector COMMAND --help shows examples",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan.add_parser(commands)
    check.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 ok, 1 findings, 2 wrong usage."""
    args = make_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read has seen enough. Python flushes once more when it exits; that must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except ValueError as error:
        print(f"offload-connector: {error}", file=sys.stderr)
        return USAGE
