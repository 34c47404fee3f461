"""The package stands alone."""

import subprocess
import sys


def test_import_needs_numpy_only() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import block_mapper;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(new - {'block_mapper', 'numpy'}))"
    )
    path = next(p for p in sys.path if p.endswith("src"))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path}, check=True
    )
    assert result.stdout.strip() == "[]"
