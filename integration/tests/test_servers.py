"""Server processes: health, time-outs, last log lines, and that nothing outlives its block."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pd_integration import servers
from pd_integration.servers import Server, ServerError, free_ports, terminate_as_interrupt

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
)


def server(tmp_path: Path, code: str) -> Server:
    port = free_ports(1)[0]
    return Server("fake", [sys.executable, "-c", code, str(port)], port, tmp_path / "logs" / "fake.log")


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_free_ports_are_different_and_no_connection_takes_them() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(low <= port <= high for port in ports)


def test_free_ports_leaves_out_ports_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        [port] = free_ports(1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        monkeypatch.setattr(servers, "PORTS", range(port, port + 1))
        with pytest.raises(ServerError, match="1 free ports wanted, 0 found"):
            free_ports(1)


def test_leader_and_children_are_gone_after_the_block(tmp_path: Path) -> None:
    with server(tmp_path, HEALTHY) as running:
        running.wait_healthy(30)
        leader = running.process.pid
        child = int(running.log_path.read_text().split()[1])
        assert alive(leader)
        assert alive(child)
    assert not alive(leader)
    assert not alive(child)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_stopped_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    running = server(tmp_path, HEALTHY)
    pids: list[int] = []

    def fail() -> None:
        with running:
            pids.append(running.process.pid)
            raise error

    with pytest.raises(error):
        fail()
    assert not alive(pids[0])


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    running = server(tmp_path, STUBBORN)
    running.start()
    pid = running.process.pid
    assert wait_for(lambda: "up" in running.log_tail())
    running.stop(timeout_s=0.5)
    assert not alive(pid)


def test_children_that_survive_their_leader_are_killed(tmp_path: Path) -> None:
    code = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True)"
    running = server(tmp_path, code)
    running.start()
    assert wait_for(lambda: "up" in running.log_path.read_text())
    child = int(running.log_path.read_text().split()[0])
    assert alive(child)
    running.stop(timeout_s=0.5)
    assert not alive(child)


def test_death_shows_the_last_log_lines(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(3)"
    with server(tmp_path, code) as running, pytest.raises(ServerError) as caught:
        running.wait_healthy(30)
    message = str(caught.value)
    assert "fake died with exit status 3" in message
    assert "[fake] line 99" in message
    assert "line 50" not in message


def test_unhealthy_server_is_a_time_out_with_its_log(tmp_path: Path) -> None:
    code = "import time\nprint('loading', flush=True)\ntime.sleep(600)"
    with server(tmp_path, code) as running, pytest.raises(ServerError, match="not healthy after 1 s") as caught:
        running.wait_healthy(1)
    assert "[fake] loading" in str(caught.value)


def test_check_of_a_server_never_started(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="fake was not started"):
        server(tmp_path, HEALTHY).check_alive()


def test_servers_stay_in_the_session_of_their_parent(tmp_path: Path) -> None:
    with server(tmp_path, HEALTHY) as running:
        running.wait_healthy(30)
        assert os.getsid(running.process.pid) == os.getsid(0)
        assert os.getpgid(running.process.pid) == running.process.pid


def test_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pd_integration.servers import Server\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"s = Server('fake', command, 1, Path({str(tmp_path)!r}) / 'log')\n"
        "s.start()\nprint(s.process.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    command = Path(f"/proc/{pid}/cmdline")
    assert wait_for(lambda: b"_child" not in command.read_bytes())  # it has become the server
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    assert wait_for(lambda: not alive(pid))


def test_sigterm_unwinds_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def wait_for_sigterm() -> None:
        with terminate_as_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        wait_for_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before
