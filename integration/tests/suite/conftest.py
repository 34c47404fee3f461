"""The service under test: started here as process groups, or somebody else's at the addresses of the options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from suite_control import DockerControl, LocalControl
from suite_service import Load, Service

from pd_integration import deployment
from pd_integration.deployment import MODEL_NAME, Sizes
from pd_integration.models import write_model
from pd_integration.servers import free_ports

# As in docker/cpu/compose.yaml: the default load wants three times Decode's KV cache.
SIZES = Sizes(decode_blocks=120, ample_blocks=600, host_bytes=64 << 20)
TRANSFER_TIMEOUT_S = 20
"""Seconds that Prefill keeps KV nobody pulls; Decode gives a pull up 60 s later (both in vLLM's Mooncake connector)."""

A3_ONLY = "needs the NPUs of an A3 host: run with --platform a3"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--platform") == "a3":
        return
    for item in items:
        if item.get_closest_marker("a3_only"):
            item.add_marker(pytest.mark.skip(reason=A3_ONLY))


@pytest.fixture(scope="session")
def load(request: pytest.FixtureRequest) -> Load:
    option = request.config.getoption
    return Load(option("--requests"), option("--prompt-tokens"), option("--output-tokens"))


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    option = request.config.getoption
    if option("--platform") == "local":
        with local_service(tmp_path_factory.mktemp("service"), load, option("--time-out")) as service:
            yield service
        return
    urls = {name: option(f"--{name}-url") for name in ("proxy", "prefill", "decode")}
    if missing := [f"--{name}-url" for name, url in urls.items() if not url]:
        pytest.exit(f"--platform {option('--platform')} needs {', '.join(missing)}", returncode=4)
    project = option("--compose-project")
    yield Service(
        platform=option("--platform"),
        proxy_url=urls["proxy"].rstrip("/"),
        prefill_url=urls["prefill"].rstrip("/"),
        decode_url=urls["decode"].rstrip("/"),
        model=option("--model-name"),
        load=load,
        time_out_s=option("--time-out"),
        trace=option("--decode-trace"),
        control=DockerControl(project) if project else None,
    )


@contextlib.contextmanager
def local_service(run_dir: Path, load: Load, time_out_s: float) -> Iterator[Service]:
    """Prefill, Decode with the connector, and the proxy, on loopback."""
    model = write_model(run_dir / "model")
    (bootstrap_port,) = free_ports(1)
    prefill = deployment.prefill_server(model, run_dir, SIZES, bootstrap_port)
    decode = deployment.decode_server(model, run_dir, SIZES, deployment.ON)
    proxy = deployment.proxy_server(prefill, bootstrap_port, decode, run_dir)
    proxy.command += ["--first-byte-timeout", f"{time_out_s:g}", "--idle-timeout", f"{time_out_s:g}"]
    for server in (prefill, decode):
        server.environment["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(TRANSFER_TIMEOUT_S)
    with prefill, decode:
        for server in (prefill, decode):
            server.wait_healthy()
        with proxy:
            proxy.wait_healthy()
            yield Service(
                platform="local",
                proxy_url=proxy.url,
                prefill_url=prefill.url,
                decode_url=decode.url,
                model=MODEL_NAME,
                load=load,
                time_out_s=time_out_s,
                trace=run_dir / "trace.jsonl",
                control=LocalControl({server.name: server for server in (prefill, decode, proxy)}),
            )


@pytest.fixture(scope="session")
def reference(service: Service, load: Load) -> dict[str, list[int]]:
    """Prompt to the tokens that Prefill gives alone, with room for all: no transfer, no preemption.

    Asked twice, with different company: in bfloat16 a token may hang on what else is in the batch. Such a prompt says
    nothing about KV, and is left out on an NPU; here there must be none.
    """
    requests = load.make("reference")
    together = service.run(service.prefill_url, requests, concurrency=len(requests))
    few = service.run(service.prefill_url, load.make("few"), concurrency=3)
    stable = {a.request.prompt: a.token_ids for a, b in zip(together, few, strict=True) if a.token_ids == b.token_ids}
    if service.platform != "a3":
        assert len(stable) == len(requests)
    assert stable, "no output of this model is independent of what else runs; nothing can be compared"
    return stable
