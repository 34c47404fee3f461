"""How an engine with saved requests ends: on request, with copies under way, and when one of its workers dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from saving import wait_until_saved

from pd_integration import deployment, models, workload
from pd_integration.deployment import MODEL_NAME, ON, Sizes
from pd_integration.servers import Server, wait_for_group
from pd_integration.workload import WorkloadError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SIZES = Sizes(max_model_len=1024, decode_blocks=64)
REQUESTS = workload.make_requests(16, prompt_tokens=75, max_tokens=900)
"""More than END_SECONDS of work, so that the end comes in the middle of it."""
END_SECONDS = 90.0
"""vLLM gives its processes some ten seconds each; the rest is for a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(tmp_path_factory.mktemp("model"))


def decode(model: Path, run_dir: Path, workers: int) -> Server:
    """Decode without another connector; more than one worker means tensor parallel ones, each a process of its own."""
    server = deployment.decode_server(model, run_dir, SIZES, ON, alone=True)
    if workers > 1:
        server.command[server.command.index("--distributed-executor-backend") + 1] = "mp"
        server.command += ["--tensor-parallel-size", str(workers)]
    return server


def shared_memory(group: int) -> set[str]:
    """The segments in /dev/shm that processes of a group have mapped."""
    segments: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if os.getpgid(int(maps.parent.name)) == group:
                segments |= set(re.findall(r"/dev/shm/\S+", maps.read_text()))
    return segments


async def interrupt(server: Server, act: Callable[[], None]) -> None:
    """Call `act` while some requests are saved; every request must end, one at least with an error."""
    async with aiohttp.ClientSession() as session:
        work = asyncio.create_task(workload.run(server.url, MODEL_NAME, REQUESTS, len(REQUESTS)))
        await wait_until_saved(session, server, work, END_SECONDS)
        act()
        with pytest.raises(WorkloadError):
            await asyncio.wait_for(work, END_SECONDS)


def test_a_worker_that_dies_takes_the_engine_down(model: Path, tmp_path: Path) -> None:
    with decode(model, tmp_path, workers=2) as server:
        server.wait_healthy()
        assert server.process is not None
        group = server.process.pid
        (worker,) = set(re.findall(r"Worker_TP1 pid=(\d+)", server.log_path.read_text()))
        segments = shared_memory(group)
        asyncio.run(interrupt(server, lambda: os.kill(int(worker), signal.SIGKILL)))
        assert wait_for_group(server.process, END_SECONDS), server.log_tail()
    assert segments  # vLLM's own at least, for the messages between its processes
    left = {path for path in segments if Path(path).exists()}
    # vLLM's CPU platform lets its workers exchange tensors here, and only the workers themselves clear it up.
    tensors = {path for path in left if path.endswith(("-cpushm_0", "-cpushm_1"))}
    for path in tensors:
        Path(path).unlink()
    assert left == tensors


def test_a_server_ends_while_requests_are_saved(model: Path, tmp_path: Path) -> None:
    with decode(model, tmp_path, workers=1) as server:
        server.wait_healthy()
        process = server.process
        assert process is not None
        asyncio.run(interrupt(server, process.terminate))
        assert wait_for_group(process, END_SECONDS), server.log_tail()
        log = server.log_path.read_text()
    assert process.returncode in (0, -signal.SIGTERM)
    assert "still running after" not in log
    assert "leaked shared_memory" not in log


LOADS_UNDER_WAY = """
import sys, time
from pathlib import Path
from pd_integration.families.run import prepare_environment
prepare_environment()
import offload_connector.within_step
offload_connector.within_step.LOAD_WITHIN_STEP_BYTES = 0
from npu_copy import Direction
from npu_copy.backends.cpu import CpuBackend
copy_blocks = CpuBackend._copy_blocks
started, ended = [], []
def slowly(self, plan):
    if plan.direction is Direction.LOAD:
        started.append(plan)
        time.sleep(3)
    copy_blocks(self, plan)
    if plan.direction is Direction.LOAD:
        ended.append(plan)
CpuBackend._copy_blocks = slowly
from vllm import LLM, SamplingParams
transfer = {"kv_connector": "RecomputeCPUOffloadConnector", "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": 1 << 26}}
llm = LLM(sys.argv[1], dtype="float32", max_model_len=512, block_size=32, max_num_seqs=16, enforce_eager=True,
    enable_prefix_caching=False, distributed_executor_backend="uni", num_gpu_blocks_override=48,
    kv_transfer_config=transfer, additional_config={"recompute_scheduler_enable": True})
engine = llm.llm_engine
for index in range(12):
    engine.add_request(str(index), f"Hello world {index} " * 5, SamplingParams(max_tokens=200, ignore_eos=True))
while len(started) == len(ended):
    engine.step()
manager = engine.engine_core.engine_core.scheduler.connector.manager
print("open", manager.has_pending_jobs(), "under way", len(started) - len(ended), flush=True)
start = time.monotonic()
engine.engine_core.shutdown()
print("left", len(started) - len(ended), "in time", time.monotonic() - start < 60, flush=True)
"""


def test_an_engine_ends_when_its_loads_under_way_have_ended(model: Path) -> None:
    """Their memory goes with the engine, so it has to wait for them, and no longer."""
    command = [sys.executable, "-c", LOADS_UNDER_WAY, str(model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "open True under way 1\n" in done.stdout
    assert "left 0 in time True\n" in done.stdout
