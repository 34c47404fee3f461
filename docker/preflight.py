"""Preflight of a container: what a server needs of its host, checked before vLLM starts.

    python preflight.py [options] [-- COMMAND...]

Every failure is one line with the fix, on stderr; then the exit status is 1. When all is well, COMMAND takes this
process's place. Only what is asked for by an option is checked.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
DRIVER = "usr/local/Ascend/driver/version.info"


def check_host_memory(nbytes: int, root: Path) -> str | None:
    """Free RAM, and the container's own memory limit, for ``nbytes``."""
    from npu_copy import InsufficientHostMemory
    from npu_copy import check_host_memory as check

    try:
        check(nbytes, root=root)
    except InsufficientHostMemory as short:
        return str(short)
    return None


def check_shm(nbytes: int, root: Path) -> str | None:
    """``nbytes`` free in /dev/shm: the Ascend driver and vLLM's message queues take shared memory there."""
    from npu_copy.host_memory import shm_free

    free = shm_free(root)
    if free is None:
        return "/dev/shm is not mounted; start the container with --shm-size, and --tmpfs must not hide it"
    if free >= nbytes:
        return None
    wanted = 1 << (-(-nbytes // (1 << 20)) - 1).bit_length()  # MiB
    size = f"{wanted >> 10}g" if wanted >= 1024 else f"{wanted}m"
    return (
        f"/dev/shm has {free / GIB:.2f} GiB free, {nbytes / GIB:.2f} GiB are needed; "
        f"start the container with --shm-size={size} or more (A3 with 16 GiB a card: --shm-size=1024g)"
    )


def check_memlock(nbytes: int, root: Path) -> str | None:
    """That this process may lock ``nbytes``."""
    from npu_copy.host_memory import memlock_free

    free = memlock_free(root)
    if free is None or free >= nbytes:
        return None
    return (
        f"the memlock limit (ulimit -l) leaves {free / GIB:.2f} GiB, {nbytes / GIB:.2f} GiB are to be pinned; "
        "start the container with --ulimit memlock=-1:-1"
    )


def check_devices(numbers: Sequence[int], cards: int, root: Path) -> str | None:
    """The davinci devices of ``numbers``, at least one for each of ``cards``, and the three managers under /dev."""
    if len(numbers) < cards:
        return f"{len(numbers)} devices for {cards} cards (tensor times data parallel size); give {cards} --devices"
    names = [f"davinci{number}" for number in numbers] + list(MANAGERS)
    missing = [f"/dev/{name}" for name in names if not (root / "dev" / name).exists()]
    if not missing:
        return None
    options = " ".join(f"--device {name}" for name in missing)
    return f"{len(missing)} of {len(names)} Ascend devices are missing; start the container with {options}"


def check_driver(minimum: tuple[int, ...], root: Path) -> str | None:
    """The host's driver is at least ``minimum``, such as (25, 5)."""
    path = root / DRIVER
    try:
        text = path.read_text()
    except OSError as error:
        return f"can't read /{DRIVER} ({error.strerror}); start the container with -v /{DRIVER}:/{DRIVER}:ro"
    found = re.search(r"^Version=(\d\S*)", text, re.MULTILINE)
    if found is None:
        return f"/{DRIVER} has no line like Version=25.5.0; mount the host's own, or reinstall its driver"
    if version(found[1]) >= minimum:
        return None
    needed = ".".join(map(str, minimum))
    return f"the Ascend driver is {found[1]}, {needed} or newer is needed; update driver and firmware on the host"


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (25, 5) for 25.5.rc1."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    if numbers is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version; write it like 25.5")
    return tuple(int(number) for number in numbers[0].split("."))


def check_model(path: Path) -> str | None:
    """A model directory with a config.json, all of it readable."""
    hint = f"mount the model's directory with -v DIR:{path}:ro, readable for user {os.getuid()}"
    if not (path / "config.json").is_file():
        return f"there is no {path}/config.json; {hint}"
    if unreadable := sorted(file.name for file in path.iterdir() if not os.access(file, os.R_OK)):
        return f"can't read {', '.join(unreadable)} in {path}; {hint}"
    return None


def run_checks(args: argparse.Namespace) -> dict[str, str | None]:
    """What ``args`` ask for: a check's name to what is wrong, None where nothing is."""
    pinned = args.cpu_bytes_per_rank * args.cards
    shm = max(args.shm, pinned if args.devices else 0)
    results = {}
    if pinned:
        results["host memory"] = check_host_memory(pinned, args.root)
    if shm:
        results["shared memory"] = check_shm(shm, args.root)
    if args.devices:
        results["memlock"] = check_memlock(pinned, args.root)
        results["devices"] = check_devices(args.devices, args.cards, args.root)
        results["driver"] = check_driver(args.min_driver, args.root)
    if args.model:
        results["model"] = check_model(args.model)
    return results


def device_list(text: str) -> list[int]:
    """Device numbers from a list such as 0,1,2."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of device numbers; write it like 0,1,2") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, then COMMAND; returns the exit status where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices",
        type=device_list,
        metavar="LIST",
        help="an Ascend host: davinci devices of this container, such as 0,1; memlock and driver are checked as well",
    )
    parser.add_argument("--cards", type=int, default=1, metavar="N", help="cards that vLLM will use (default 1)")
    parser.add_argument(
        "--cpu-bytes-per-rank", type=int, default=0, metavar="BYTES", help="cpu_bytes_to_use_per_rank of each card"
    )
    parser.add_argument("--shm", type=int, default=0, metavar="BYTES", help="needed in /dev/shm at least")
    parser.add_argument(
        "--min-driver", type=version, default="25.5", metavar="VERSION", help="oldest driver (default %(default)s)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model's directory")
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what to start when all is well")
    args = parser.parse_args(argv)
    results = run_checks(args)
    failed = {name: failure for name, failure in results.items() if failure is not None}
    for name, failure in failed.items():
        print(f"preflight: FAILED {name}: {failure}", file=sys.stderr, flush=True)
    if failed:
        return 1
    print(f"preflight: ok: {', '.join(results) or 'nothing to check'}", flush=True)
    if args.command:
        os.execvp(args.command[0], args.command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
