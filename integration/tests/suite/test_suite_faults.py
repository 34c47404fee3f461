"""Servers that die, networks that break, shared memory that fills up, in the middle of the work.

What must hold each time: a request ends with the right tokens or with an error that says what happened; nothing hangs
beyond the configured time-out; and once the server is back, the service works.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest
from suite_control import Control, DockerControl
from suite_service import Load, Service, differing, wait_for

from pd_integration import workload
from pd_integration.workload import Request, Result, WorkloadError

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(900)]

FREEZES = 200
FILLER = "/dev/shm/filler"
PREFLIGHT = ("python", "/opt/pd/preflight.py", "--shm=420000000")


@pytest.fixture
def control(service: Service) -> Control:
    if service.control is None:
        pytest.skip("the servers belong to somebody else: give --compose-project, or run with --platform local")
    service.wait_ready()
    return service.control


@pytest.fixture
def docker(control: Control) -> DockerControl:
    if not isinstance(control, DockerControl):
        pytest.skip("networks and /dev/shm of their own are what containers have: run with --platform docker")
    return control


@dataclass
class Outcome:
    """How one request ended: with all its tokens, or with an error."""

    result: Result | None
    error: str


class Traffic:
    """Requests on their way through the proxy, in the background, and how each of them ends."""

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._service = service
        self._requests = requests
        self.tokens = 0

    async def ends(self) -> list[Outcome]:
        """Send everything at once and wait for all."""
        return await self._all(asyncio.sleep(0))

    async def disturbed_by(self, fault: Callable[[], None]) -> list[Outcome]:
        """Send everything at once, call ``fault`` in a thread as soon as the first token is there, wait for all."""
        return await self._all(asyncio.to_thread(self._once_flowing, fault))

    async def _all(self, fault_is_over: Awaitable[None]) -> list[Outcome]:
        running = [asyncio.create_task(self._one(request)) for request in self._requests]
        limit = 2 * self._service.time_out_s  # one time-out until the first event, one between two events
        try:
            await fault_is_over
            _, hanging = await asyncio.wait(running, timeout=limit)
            assert not hanging, f"{len(hanging)} requests hang: they have not ended {limit:g} s after the fault"
            return [task.result() for task in running]
        finally:
            for task in running:
                task.cancel()

    def _once_flowing(self, fault: Callable[[], None]) -> None:
        wait_for(lambda: self.tokens > 0, self._service.time_out_s, "the first token")
        fault()

    async def _one(self, request: Request) -> Outcome:
        def on_tokens(count: int) -> None:
            self.tokens += count

        url, model = self._service.proxy_url, self._service.model
        try:
            (result,) = await workload.run(url, model, [request], 1, on_tokens, stall_timeout_s=math.inf)
        except WorkloadError as error:
            return Outcome(None, str(error))
        return Outcome(result, "")


def check(outcomes: list[Outcome], reference: dict[str, list[int]]) -> None:
    """Right tokens, or an error that names itself."""
    assert differing([outcome.result for outcome in outcomes if outcome.result], reference) == []
    unclear = [outcome.error for outcome in outcomes if outcome.result is None and not is_clear(outcome.error)]
    assert unclear == []


def is_clear(error: str) -> bool:
    """An HTTP status or an error event, with a message."""
    return '"message"' in error and '"message": ""' not in error


def works_again(service: Service, load: Load, reference: dict[str, list[int]], name: str) -> None:
    """The service is ready, and serves under pressure what it should."""
    service.wait_ready()
    requests = load.make(f"after-{name}")
    before = service.preemptions()
    assert differing(service.run(service.proxy_url, requests, concurrency=len(requests)), reference) == []
    assert service.preemptions() > before


def test_prefill_is_killed_in_mid_transfer(
    service: Service, control: Control, load: Load, reference: dict[str, list[int]]
) -> None:
    def kill_while_decode_waits_for_kv() -> None:
        # Stopped at a moment of no choice, until one comes at which Decode has asked for KV and not got it.
        rng = random.Random(0)
        for _ in range(FREEZES):
            control.freeze("prefill")
            time.sleep(0.3)
            if service.metric("vllm:num_requests_waiting_by_reason", reason="deferred") > 0:
                break
            control.thaw("prefill")
            time.sleep(rng.uniform(0.01, 0.1))
        else:
            pytest.fail(f"in {FREEZES} tries no transfer was under way")
        control.kill("prefill")

    # Twice as many as run at once: KV is asked for whenever one of them ends, not in the first moments alone.
    traffic = Traffic(service, load.make("killed", 2 * load.requests))
    outcomes = asyncio.run(traffic.disturbed_by(kill_while_decode_waits_for_kv))
    check(outcomes, reference)
    assert any(outcome.error for outcome in outcomes)
    control.start("prefill")
    works_again(service, load, reference, "killed")


def test_decode_is_restarted(service: Service, control: Control, load: Load, reference: dict[str, list[int]]) -> None:
    def restart() -> None:
        control.kill("decode")
        control.start("decode")

    outcomes = asyncio.run(Traffic(service, load.make("restarted")).disturbed_by(restart))
    check(outcomes, reference)
    assert any(outcome.error for outcome in outcomes)
    works_again(service, load, reference, "restarted")


def test_the_network_between_prefill_and_decode_is_cut(
    service: Service, docker: DockerControl, load: Load, reference: dict[str, list[int]]
) -> None:
    with docker.cut_off("prefill", "kv"):
        outcomes = asyncio.run(Traffic(service, load.make("cut", 4)).ends())
        check(outcomes, reference)
        assert all(outcome.error for outcome in outcomes)
    # Its address on that network may be another one now.
    docker.kill("prefill")
    docker.start("prefill")
    works_again(service, load, reference, "cut")


def test_shared_memory_fills_up(
    service: Service, docker: DockerControl, load: Load, reference: dict[str, list[int]]
) -> None:
    def fill() -> None:
        docker.run_in("decode", "sh", "-c", f"cat /dev/zero > {FILLER}")

    outcomes = asyncio.run(Traffic(service, load.make("full")).disturbed_by(fill))
    check(outcomes, reference)
    if docker.is_running("decode"):
        refused = docker.run_in("decode", *PREFLIGHT)
        if refused.returncode == 1 and "FAILED shared memory: /dev/shm has 0.00 GiB free" in refused.stderr:
            docker.kill("decode")
        else:
            # The engine dies of the full /dev/shm at a moment of its own, and its container takes the preflight along.
            wait_for(lambda: not docker.is_running("decode"), 30, f"the container to end; {refused}")
    docker.start("decode")
    works_again(service, load, reference, "full")
