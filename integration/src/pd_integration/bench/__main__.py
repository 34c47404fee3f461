"""All benchmarks, one after the other, and the page: `python -m pd_integration.bench`."""

from __future__ import annotations

import subprocess
import sys

PARTS = ("scheduler", "thrash", "neighbours", "decode", "scale", "page")
"""Modules here. The copies are measured by npu-copy's own benchmark, which needs none of this."""


def main() -> int:
    """Run every part in a process of its own; the exit status is that of the first that fails."""
    for part in PARTS:
        print(f"== {part}", flush=True)
        if status := subprocess.run([sys.executable, "-m", f"pd_integration.bench.{part}"], check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
