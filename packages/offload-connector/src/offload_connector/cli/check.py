"""`offload-connector check`: will this host and this configuration do?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from offload_connector.cli.findings import ERROR, NOTE, WARNING, Finding, is_bad
from offload_connector.cli.json_text import read_json
from offload_connector.cli.lint import ADDITIONAL, TRANSFER, Transfer, lint_additional, lint_together, lint_transfer
from offload_connector.cli.parallel import add_parallel_options, deployment
from offload_connector.cli.units import parse_bytes, show_bytes

HOST = "host memory"

EXAMPLE = """\
examples:
  offload-connector check --kv-transfer-config @decode.json \\
      --additional-config '{"recompute_scheduler_enable": true}' -tp 8 -dp 2 --cards-per-host 16
  offload-connector check --cpu-bytes-per-rank 16GiB -tp 16        # only the host, inside its container
  offload-connector check --kv-transfer-config @decode.json --no-host --json

exit status: 0 fine (notes at most), 1 errors or warnings, 2 wrong usage
"""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-commands."""
    parser = commands.add_parser(
        "check",
        help="preflight of the host's memory, and a linter for vLLM's JSON options",
        description="Check a configuration and the memory of this host before vLLM is started.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(TRANSFER, metavar="JSON", help="as for vLLM, or @FILE")
    parser.add_argument(ADDITIONAL, metavar="JSON", help="as for vLLM, or @FILE")
    add_parallel_options(parser)
    parser.add_argument(
        "--cpu-bytes-per-rank", type=parse_bytes, metavar="BYTES", help="the budget, where no configuration is given"
    )
    parser.add_argument("--device", default="npu", choices=("npu", "cuda", "cpu"), help="default: npu")
    parser.add_argument("--no-host", action="store_true", help="do not look at this host's memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Raises:
        ValueError: there is nothing to check, or a file cannot be read.
    """
    transfer_text, additional_text = _text(args.kv_transfer_config), _text(args.additional_config)
    if transfer_text is None and additional_text is None and args.cpu_bytes_per_rank is None:
        raise ValueError(f"nothing to check: give {TRANSFER}, {ADDITIONAL} or --cpu-bytes-per-rank")
    if transfer_text is not None and args.cpu_bytes_per_rank is not None:
        raise ValueError(f"{TRANSFER} has the budget already; take --cpu-bytes-per-rank out")
    host = deployment(args)
    findings: list[Finding] = []
    transfer: Transfer | None = None
    if transfer_text is not None:
        value, findings = read_json(transfer_text, TRANSFER)
        if value is not None:
            transfer = lint_transfer(value, host)
            findings += transfer.findings
    flag: bool | None = False
    if additional_text is not None:
        value, faults = read_json(additional_text, ADDITIONAL)
        flag, more = lint_additional(value) if value is not None else (None, [])
        findings += faults + more
    if transfer_text is None or transfer is not None:
        findings += lint_together(transfer, flag)
    per_rank = transfer.per_rank if transfer else args.cpu_bytes_per_rank
    if per_rank is not None and not args.no_host:
        findings += host_findings(per_rank, host.busiest_host_cards, args.device)
    bad = is_bad(findings)
    if args.json:
        report = {"ok": not bad, "cpu_bytes_to_use_per_rank": per_rank, "cards": host.busiest_host_cards}
        print(json.dumps({**report, "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        print("\n".join([*map(str, findings), "not fit to start" if bad else "ok"]))
    return 1 if bad else 0


def _text(option: str | None) -> str | None:
    if option is None or not option.startswith("@"):
        return option
    try:
        return Path(option[1:]).read_text()
    except OSError as error:
        raise ValueError(f"cannot read {option[1:]}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {option[1:]}: it is not text, which JSON is") from error


def host_findings(per_rank: int, cards: int, device: str, root: Path = Path("/")) -> list[Finding]:
    """Hold the budgets of `cards` ranks against what this host can give.

    Args:
        per_rank: bytes of each rank.
        cards: ranks on this host.
        device: "npu", "cuda" or "cpu"; an NPU's driver wants the pinned memory to fit /dev/shm as well.
        root: where /proc, /sys and /dev are looked up.
    """
    try:
        from npu_copy.host_memory import InsufficientHostMemory, check_host_memory, memlock_free
    except ImportError as error:
        text = f"not checked, npu-copy cannot be imported here ({error}); --no-host leaves it out"
        return [Finding(WARNING, HOST, text)]
    total = per_rank * cards
    findings = [Finding(NOTE, HOST, f"{cards} card(s) x {show_bytes(per_rank)} = {show_bytes(total)}")]
    try:
        check_host_memory(total, shm=device == "npu", root=root)
    except InsufficientHostMemory as short:
        findings.append(Finding(ERROR, HOST, str(short)))
    locked = memlock_free(root) if device != "cpu" else None
    if locked is not None and locked < per_rank:
        text = f"RLIMIT_MEMLOCK leaves {show_bytes(locked)} to this process. The driver's pinned memory does not count "
        text += "there; should pinning fail at start-up all the same, start the container with --ulimit memlock=-1"
        findings.append(Finding(NOTE, HOST, text))
    return findings
