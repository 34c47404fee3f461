"""Check the torch_npu names that the NPU backend uses against the Python files of a torch-npu wheel.

    python tools/check_torch_npu.py 2.14.0

Downloads the wheel with pip (some 40 MB, not installed; no CANN needed) and adds the version to
``tests/torch_npu_names.json`` when all names are there.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAMES = Path(__file__).parent.parent / "tests/torch_npu_names.json"


def functions(tree: ast.AST) -> dict[str, list[str]]:
    """Parameters of the functions and methods of a module or class, without self and cls; a class by its __new__."""
    found = {}
    for node in tree.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
        elif isinstance(node, ast.ClassDef):
            found[node.name] = functions(node).get("__new__", [])
    return found


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def missing(wheel: zipfile.ZipFile, names: dict) -> list[str]:
    """What the wheel does not have as expected."""
    parsed = {p: ast.parse(wheel.read(f"torch_npu/npu/{p}.py")) for p in ("streams", "utils", "__init__")}
    stream, event = class_named(parsed["streams"], "Stream"), class_named(parsed["streams"], "Event")
    have = functions(parsed["utils"]) | functions(parsed["streams"]) | functions(stream) | functions(event)
    # Properties of the compiled base class show only where the Python files use them.
    used = {node.attr for node in ast.walk(stream) if isinstance(node, ast.Attribute)}
    exported = {n.value for n in ast.walk(parsed["__init__"]) if isinstance(n, ast.Constant)}
    wanted = {*names["module"], *names["stream"], *names["event"]}
    problems = [f"no {name}" for name in wanted if name not in have and name not in used]
    problems += [f"{name} is not exported by torch_npu.npu" for name in names["module"] if name not in exported]
    for name, parameters in names["parameters"].items():
        absent = [p for p in parameters if p not in have.get(name, [])]
        problems += [f"{name} has no parameter {p}" for p in absent]
    sources = (wheel.read(f).decode() for f in wheel.namelist() if f.endswith(".py"))
    if not any('_register_device_module("npu"' in s or "_register_device_module('npu'" in s for s in sources):
        problems.append("torch.npu is not registered")
    return sorted(problems)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    version = sys.argv[1]
    names = json.loads(NAMES.read_text())
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, f"torch-npu=={version}"], check=True, timeout=600)
        (wheel,) = Path(folder).glob("*.whl")
        problems = missing(zipfile.ZipFile(wheel), names)
    if problems:
        raise SystemExit(f"torch-npu {version}: " + "; ".join(problems))
    names["checked"] = sorted({*names["checked"], version})
    NAMES.write_text(json.dumps(names, indent=2) + "\n")
    print(f"torch-npu {version}: all names are there")


if __name__ == "__main__":
    main()
