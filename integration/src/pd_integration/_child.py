"""Runs a command that must not outlive its parent: `python -m pd_integration._child PARENT_PID COMMAND...`.

It asks Linux for a SIGTERM when the parent dies (`PR_SET_PDEATHSIG`, which survives exec) and then becomes the command.
So a test runner that is killed with SIGKILL leaves no server behind either.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(argv: list[str]) -> None:
    """Replace this process by ``argv[1:]``, bound to the life of process ``argv[0]``."""
    parent = int(argv[0])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
