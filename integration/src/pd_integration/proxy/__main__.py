"""Command line: python -m pd_integration.proxy --help"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import MISSING, fields

from pd_integration.proxy.config import ConfigError, Prefiller, ProxyConfig
from pd_integration.proxy.serve import run

_DESCRIPTION = "One OpenAI endpoint in front of Prefill and Decode servers that are joined by Mooncake."
_EXAMPLE = """\
example: one Prefill and two Decode servers

  python -m pd_integration.proxy \\
      --prefill http://127.0.0.1:8100 --prefill-bootstrap http://127.0.0.1:8998 \\
      --decode http://127.0.0.1:8200 --decode http://127.0.0.1:8201 --port 8000

Repeat --prefill and --prefill-bootstrap for every Prefill server: the first bootstrap belongs to the first --prefill,
and so on. A bootstrap address is given to Decode servers, so they must reach it.
"""
_HELP = {
    "max_body_bytes": "largest request body",
    "connect_timeout": "seconds to connect to a server before the next one is tried",
    "prefill_timeout": "seconds for Prefill's whole answer",
    "first_byte_timeout": "seconds for Decode's first streamed event",
    "idle_timeout": "seconds between two streamed events",
    "total_timeout": "seconds for a whole request",
    "aside_timeout": "seconds for a small question to a server, the text of a few tokens say",
    "max_resends": "how often a request may be sent to Prefill again after Decode gave it up",
    "health_interval": "seconds between health checks",
    "health_timeout": "seconds for one health check",
    "health_failures": "failed checks in a row until a server counts as down",
    "shutdown_timeout": "seconds for requests in flight after SIGTERM or SIGINT",
}


def parse_args(argv: Sequence[str] | None = None) -> ProxyConfig:
    """The configuration that the command line asks for; exits with a message and status 2 when it is unusable."""
    parser = argparse.ArgumentParser(
        "python -m pd_integration.proxy",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prefill", action="append", default=[], metavar="URL", help="a Prefill server; repeat for more")
    add("--prefill-bootstrap", action="append", default=[], metavar="URL", help="its Mooncake bootstrap server")
    add("--decode", action="append", default=[], metavar="URL", help="a Decode server; repeat for more")
    add("--host", default=ProxyConfig.host, help="address to listen on (default %(default)s)")
    add("--port", type=int, default=ProxyConfig.port, help="port to listen on, 0 for any (default %(default)s)")
    add(
        "--transfer-from-answer",
        action="store_true",
        help="Prefill's answers say where its KV is (vllm-ascend's MooncakeConnectorV1): no --prefill-bootstrap",
    )
    for field in fields(ProxyConfig):
        if field.name in _HELP:
            assert field.default is not MISSING
            add(
                "--" + field.name.replace("_", "-"),
                type=type(field.default),
                default=field.default,
                metavar="N",
                help=_HELP[field.name] + " (default %(default)s)",
            )
    args = vars(parser.parse_args(argv))
    prefills, bootstraps = args.pop("prefill"), args.pop("prefill_bootstrap")
    if args.pop("transfer_from_answer"):
        if bootstraps:
            parser.error("--prefill-bootstrap is of no use with --transfer-from-answer; leave one of the two out")
        bootstraps = [None] * len(prefills)
    if len(prefills) != len(bootstraps):
        parser.error(
            f"{len(prefills)} --prefill but {len(bootstraps)} --prefill-bootstrap; give one bootstrap per --prefill"
        )
    try:
        return ProxyConfig(
            prefillers=tuple(Prefiller(*pair) for pair in zip(prefills, bootstraps, strict=True)),
            decoders=tuple(args.pop("decode")),
            **args,
        )
    except ConfigError as error:
        parser.error(str(error))


def main() -> None:
    config = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run(config)
    except OSError as error:
        raise SystemExit(
            f"can't listen on {config.host}:{config.port}: {error.strerror}; choose another --port"
        ) from None


if __name__ == "__main__":
    main()
