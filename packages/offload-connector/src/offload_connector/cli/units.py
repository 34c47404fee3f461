"""Byte counts as people write and read them."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(text: str) -> int:
    """Read `17179869184`, `16GiB` or `1.5 TiB`; for argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS or (not match[2] and "." in match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 17179869184, or 16GiB (also MiB, TiB)")
    nbytes = int(float(match[1]) * UNITS[match[2].lower()]) if match[2] else int(match[1])
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no bytes at all; write at least 1")
    return nbytes


def positive(text: str) -> int:
    """Read a whole number of at least 1; for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """Read a whole number of at least 0; for argparse."""
    return 0 if text == "0" else positive(text)


def show_bytes(nbytes: int) -> str:
    """Write a byte count with its GiB, or MiB where that is less than one."""
    unit, name = (1 << 30, "GiB") if nbytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{nbytes:,} bytes ({nbytes / unit:,.2f} {name})"
