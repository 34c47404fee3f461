"""Functions in processes of their own, which start with vLLM imported: a second or two instead of ten.

Several can take turns: one runs for a slice of time while the others wait, so that whatever else the machine does, and
however its speed drifts, it meets all of them alike.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SLICE_S = 0.25
READY, PAUSED = "ready", "paused"

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pd_integration.bench.preload"])


@dataclass(frozen=True)
class _Failure:
    text: str


@dataclass(frozen=True)
class Task:
    """Call ``function(argument, turns)`` in a process whose output goes to ``log``."""

    function: Callable[[Any, Turns], Any]
    argument: Any
    log: Path


class Turns:
    """The process's side: `begin` when what is to be measured can start, `give` often from then on.

    Attributes:
        pauses: (start, end) of each time in which others ran, seconds since the epoch.
    """

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._until = 0.0
        self.pauses: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Wait until all are ready and it is this process's turn."""
        self._hand_over(READY)

    def give(self) -> None:
        """Let the others run, if this process has had its slice."""
        if time.monotonic() >= self._until:
            start = time.time()
            self._hand_over(PAUSED)
            self.pauses.append((start, time.time()))

    def _hand_over(self, state: str) -> None:
        self._parent.send(state)
        self._parent.recv()
        self._until = time.monotonic() + SLICE_S


def take_turns(tasks: Sequence[Task], timeout_s: float) -> list[Any]:
    """Run ``tasks`` slice by slice in turn, and return their results in order.

    Raises:
        RuntimeError: one raised (with its traceback), its process died, or all together took longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    children = [_Child(task, deadline) for task in tasks]
    try:
        for child in children:
            child.start()  # one after the other: they would only be in each other's way
        running = children
        while running := [child for child in running if not child.done]:
            for child in running:
                child.go_on()
        return [child.result for child in children]
    finally:
        for child in children:
            child.stop()


class _Child:
    def __init__(self, task: Task, deadline: float) -> None:
        self._task, self._deadline = task, deadline
        self._connection, self._theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_run, args=(task, self._theirs))
        self.done = False
        self.result: Any = None

    def start(self) -> None:
        self._process.start()
        self._theirs.close()
        self._take()

    def go_on(self) -> None:
        self._connection.send(None)
        self._take()

    def _take(self) -> None:
        log = self._task.log
        if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
            raise RuntimeError(f"out of time, see {log}")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process died, see {log}") from None
        if isinstance(answer, _Failure):
            raise RuntimeError(f"{answer.text}\nIts output: {log}")
        if answer not in (READY, PAUSED):
            self.done, self.result = True, answer

    def stop(self) -> None:
        if self._process.pid is not None:
            self._connection.close()
            self._process.join(5 if self.done else 0)
            self._process.kill()
            self._process.join()


def _run(task: Task, parent: Connection) -> None:
    output = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        parent.send(task.function(task.argument, Turns(parent)))
    except BaseException:
        parent.send(_Failure(traceback.format_exc()))
    parent.close()
    # Threads of Mooncake's may wait for peers that are gone; nothing of this process is needed any more.
    os._exit(0)
