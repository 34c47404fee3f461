"""Command-line options of the suite, here so that `pytest integration --platform ...` knows them, and hatch.toml."""

from pathlib import Path
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def hatch_envs() -> dict[str, Any]:
    """The environments of hatch.toml by name."""
    return tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("prefill/decode suite")
    add = group.addoption
    add(
        "--platform",
        choices=("local", "docker", "a3"),
        default="local",
        help="where the servers run: started here as process groups (default), in docker/cpu, or on an A3 host",
    )
    add("--proxy-url", help="the proxy, for --platform docker and a3")
    add("--prefill-url", help="the Prefill server; asked alone, it gives the reference outputs")
    add("--decode-url", help="the Decode server; its /metrics are read")
    add("--model-name", default="tiny", help="--served-model-name of the servers (default %(default)s)")
    add("--decode-trace", type=Path, help="the step trace that Decode writes, where it can be read from here")
    add("--compose-project", help="docker: compose project of the containers; lets the fault tests stop and cut them")
    add("--time-out", type=float, default=90, help="the proxy's --first-byte-timeout in seconds (default %(default)s)")
    add("--ranks", type=int, default=1, help="a3: cards of Decode, tensor times data parallel size")
    add("--cpu-bytes-per-rank", type=int, default=17179869184, help="a3: cpu_bytes_to_use_per_rank of Decode")
    add("--requests", type=int, default=16, help="requests sent at once (default %(default)s)")
    add("--prompt-tokens", type=int, default=400, help="length of a prompt (default %(default)s)")
    add("--output-tokens", type=int, default=320, help="tokens that each request asks for (default %(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    # Here and not in pyproject.toml, which does not come along into the containers.
    for marker in (
        "e2e: starts real servers, or talks to some; takes minutes",
        "faults: kills, cuts off and disturbs the servers",
        "a3_only: what only an A3 host can show",
    ):
        config.addinivalue_line("markers", marker)
