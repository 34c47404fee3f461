"""Stopping, starting and disturbing the servers under test: as process groups of this machine, or as containers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import Protocol

from pd_integration.servers import Server

DOCKER_TIMEOUT_S = 120.0
FREEZE_TRIES = 5


class Control(Protocol):
    """Names of servers are "prefill", "decode" and "proxy"."""

    def freeze(self, name: str) -> None:
        """Let the server's processes stand still."""

    def thaw(self, name: str) -> None:
        """Let them go on."""

    def kill(self, name: str) -> None:
        """SIGKILL to every process of the server, frozen or not."""

    def start(self, name: str) -> None:
        """Start a server that was killed, on its old addresses; does not wait for it."""


class LocalControl:
    """Process groups that were started here."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._servers = servers

    def freeze(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def kill(self, name: str) -> None:
        self._signal(name, signal.SIGKILL)
        self._servers[name].stop()  # reaps it

    def start(self, name: str) -> None:
        self._servers[name].start()

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._servers[name].process
        assert process is not None
        os.killpg(process.pid, number)


class DockerControl:
    """Containers of a compose project; does what only containers allow as well."""

    def __init__(self, project: str) -> None:
        self._project = project

    def freeze(self, name: str) -> None:
        for left in reversed(range(FREEZE_TRIES)):
            try:
                docker("pause", self._container(name))
                return
            except RuntimeError as error:
                # On busy machines the kernel may not get all processes to stand still at once; runc then lets go.
                if "unable to freeze" not in str(error) or not left:
                    raise

    def thaw(self, name: str) -> None:
        docker("unpause", self._container(name))

    def kill(self, name: str) -> None:
        docker("kill", self._container(name))

    def start(self, name: str) -> None:
        docker("start", self._container(name))

    @contextlib.contextmanager
    def cut_off(self, name: str, network: str) -> Iterator[None]:
        """Take the server off one network of the project, under all of its names there, while the block runs."""
        container, network = self._container(name), f"{self._project}_{network}"
        template = f'{{{{range (index .NetworkSettings.Networks "{network}").Aliases}}}}{{{{.}}}} {{{{end}}}}'
        aliases = docker("inspect", "-f", template, container).split()
        docker("network", "disconnect", network, container)
        try:
            yield
        finally:
            docker("network", "connect", *(f"--alias={alias}" for alias in aliases), network, container)

    def run_in(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run ``command`` in the server's container."""
        full = ["docker", "exec", self._container(name), *command]
        return subprocess.run(full, capture_output=True, text=True, timeout=DOCKER_TIMEOUT_S)

    def is_running(self, name: str) -> bool:
        """Whether the server's container runs."""
        return docker("inspect", "-f", "{{.State.Running}}", self._container(name)).strip() == "true"

    def _container(self, name: str) -> str:
        labels = {"project": self._project, "service": name}
        filters = [f"--filter=label=com.docker.compose.{label}={value}" for label, value in labels.items()]
        found = docker("ps", "-aq", *filters).split()
        assert len(found) == 1, f"{len(found)} containers of service {name} in compose project {self._project}"
        return found[0]


def docker(*arguments: str) -> str:
    """What ``docker ARGUMENTS`` prints; RuntimeError with its own message when it fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=DOCKER_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
