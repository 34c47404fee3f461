"""The backend uses no torch_npu name but those checked against torch-npu's own files (tools/check_torch_npu.py)."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import npu_copy

NAMES = json.loads(Path(__file__).with_name("torch_npu_names.json").read_text())
BACKENDS = Path(npu_copy.__file__).parent / "backends"
# Expressions in the backends that hold a torch_npu object.
HOLDERS = {
    "module": {"device_module", "self._module"},
    "stream": {"stream", "compute", "self._compute_stream()"},
    "event": {"ready", "begin", "end", "self._begin", "self._end"},
}


def used_names(kind: str) -> set[str]:
    names = set()
    for file in ("stream.py", "npu.py"):
        for node in ast.walk(ast.parse((BACKENDS / file).read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in HOLDERS[kind]:
                names.add(node.attr)
    return names


def test_every_name_used_was_checked() -> None:
    assert NAMES["checked"], "run tools/check_torch_npu.py"
    for kind in HOLDERS:
        assert used_names(kind) == set(NAMES[kind])
