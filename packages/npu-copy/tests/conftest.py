from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_npu import FakeNpu
from hypothesis import settings

from npu_copy import _acl

HERE = Path(__file__).parent

# A busy machine is no failure.
settings.register_profile("npu-copy", deadline=None)
settings.load_profile("npu-copy")


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile a C file of this package to a shared library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")

    def build(source: Path, *flags: str) -> Path:
        library = tmp_path_factory.mktemp("lib") / f"{source.stem}.so"
        command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-pthread", *flags]
        subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
        return library

    return build


@pytest.fixture(scope="session")
def fake_acl(compile_c: Callable[..., Path]) -> Path:
    return compile_c(HERE / "fake_acl.c")


@pytest.fixture
def npu(fake_acl: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNpu]:
    """A machine with a (fake) NPU: torch_npu importable, libascendcl loadable; device memory is CPU tensors."""
    fake = FakeNpu(fake_acl)
    acl = _acl.Acl(str(fake_acl))
    monkeypatch.setattr(_acl, "load", lambda: acl)
    torch_npu = ModuleType("torch_npu")
    torch_npu.npu = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    yield fake
    fake.close()
    fake.library.fake_refuse_batch(0)
    fake.library.fake_refuse_malloc(0)
    fake.library.fake_fail_next_copy(0)
