"""The command as a shell runs it."""

import os
import subprocess
import sys

COMMAND = [sys.executable, "-m", "offload_connector.cli"]
CHECK = [*COMMAND, "check", "--no-host"]


def test_it_runs_as_a_module():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("offload-connector "), done.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run([*CHECK, "--kv-transfer-config", "{}"], stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "binary"
    file.write_bytes(b"\x7fELF\xb0\xff")
    done = subprocess.run([*CHECK, "--kv-transfer-config", f"@{file}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"offload-connector: cannot read {file}: it is not text, which JSON is\n"
