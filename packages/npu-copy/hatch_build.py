"""Compile the copy helper when a wheel is built, where a C compiler is at hand.

The helper is a plain shared library loaded by ctypes: it depends on the platform, not on the Python version. Without a
compiler the wheel is pure Python and copies more slowly.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "src/npu_copy/_blockcopy.c"
LIBRARY = SOURCE.with_suffix(".so")


class BlockCopyHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        LIBRARY.unlink(missing_ok=True)
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if compiler is None:
            self.app.display_warning("npu-copy: no C compiler found; small blocks will be copied more slowly")
            return
        command = [*shlex.split(compiler), "-std=c11", "-O3", "-shared", "-fPIC", str(SOURCE), "-o", str(LIBRARY)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or error
            self.app.display_warning(f"npu-copy: {shlex.join(command)} failed, copying without it: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
