"""A function in a process of its own, which starts with vLLM imported: a second or two instead of ten."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pd_integration.bench.preload"])


@dataclass(frozen=True)
class _Failure:
    text: str


def call(function: Callable[[Any], Any], argument: Any, log: Path, timeout_s: float) -> Any:
    """Return ``function(argument)``, run in a new process whose output goes to ``log``.

    Raises:
        RuntimeError: it raised (with its traceback), its process died, or it took longer than ``timeout_s``.
    """
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(function, argument, log, sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout_s):
            raise RuntimeError(f"not done in {timeout_s:.0f} s, see {log}")
        answer = receiving.recv()
    except EOFError:
        raise RuntimeError(f"the process died, see {log}") from None
    finally:
        process.join(5)
        process.kill()
        process.join()
        receiving.close()
    if isinstance(answer, _Failure):
        raise RuntimeError(f"{answer.text}\nIts output: {log}")
    return answer


def _run(function: Callable[[Any], Any], argument: Any, log: Path, answer: Connection) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        answer.send(function(argument))
    except BaseException:
        answer.send(_Failure(traceback.format_exc()))
    answer.close()
    # Threads of Mooncake's may wait for peers that are gone; nothing of this process is needed any more.
    os._exit(0)
