"""Server processes: start, wait until healthy, show the log of one that died, always stop.

A `Server` is a context manager. Each runs in a process group of its own, so that stopping it reaches the engine core
and worker processes that vLLM starts, and each gets a SIGTERM from the kernel should this process be killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
PORTS = range(20000, 30000)
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1

# Set for every vLLM server; why each is there:
VLLM_ENVIRONMENT = {
    "VLLM_HOST_IP": HOST,  # Mooncake and the side channels bind here, not to the machine's public address
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB that vLLM's CPU worker may plan with; the block count is set by the caller
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # no pinning: several servers share the cores
    "OMP_NUM_THREADS": "1",  # tiny matrices: a second thread only waits
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the CPU platform accept `--distributed-executor-backend uni`
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is on disk
    "VLLM_LOGGING_COLOR": "0",
}


class ServerError(RuntimeError):
    """A server died, did not become healthy in time, or could not be stopped; the message ends with its log."""


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports that are free on the loopback interface now.

    They lie in `PORTS`, below the range from which Linux takes the ports of outgoing connections: a server that binds
    its port seconds later still finds it free.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ServerError(f"{count} free ports wanted, {len(found)} found from {PORTS.start} to {PORTS.stop - 1}")


class Server:
    """One server process that answers ``GET /health`` on the loopback interface.

    ``command`` is its argument vector, ``environment`` is added to this process's own, ``log_path`` takes its output.
    """

    def __init__(
        self, name: str, command: Sequence[str], port: int, log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = list(command)
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.log_path = log_path
        self.environment = dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; returns at once, see `wait_healthy`."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        bound_to_us = [sys.executable, "-m", "pd_integration._child", str(os.getpid()), *self.command]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                bound_to_us,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Not a session of its own: Linux schedules sessions against each other (sched_autogroup), and a server
                # that polls, as Mooncake's sender does, then starves the threads that serve its transfer for seconds.
                process_group=0,
            )

    def check_alive(self) -> None:
        """Raise ServerError, with the end of the log, if the process has died."""
        if self.process is None:
            raise ServerError(f"{self.name} was not started")
        if (code := self.process.poll()) is not None:
            raise ServerError(f"{self.name} died with exit status {code}\n{self.log_tail()}")

    def is_healthy(self) -> bool:
        """Whether the server answers its health check with 200 within two seconds."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait_healthy(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the server is healthy; ServerError if it dies first or ``timeout_s`` passes."""
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} was not healthy after {timeout_s:.0f} s\n{self.log_tail()}")
            time.sleep(POLL_S)

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log, each with the server's name in front."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError as error:
            text = f"(no log: {error})"
        return "\n".join(f"[{self.name}] {line}" for line in text.splitlines()[-lines:])

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the whole process group: SIGTERM, and SIGKILL for what is left after ``timeout_s``."""
        if self.process is None:
            return
        process, self.process = self.process, None
        for sig in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sig)
            if wait_for_group(process, timeout_s):
                return
        raise ServerError(f"{self.name}: processes of group {process.pid} are left after SIGKILL")

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def wait_for_group(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether every process of the group of ``process`` is gone within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        process.poll()  # reaps the leader
        if not _group_members(process.pid):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


def _group_members(group: int) -> list[int]:
    """Processes of ``group``, without zombies: an orphan's may stay if the container's first process never waits."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            # After the name, which may hold anything: state, parent, group (proc_pid_stat(5)).
            state, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in "ZX":
                members.append(int(entry.name))
    return members


def vllm_server(
    name: str,
    model: Path,
    log_path: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Server:
    """vLLM's OpenAI API server for ``model`` on a free loopback port; ``arguments`` are added to its command line."""
    port = free_ports(1)[0] if port is None else port
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", HOST, "--port", str(port), *arguments]
    return Server(name, command, port, log_path, {**VLLM_ENVIRONMENT, **(environment or {})})


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that it unwinds the `with` blocks that stop servers as Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {signum}")

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
