"""Start a vLLM server for a run, and stop it however the run ends."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from valence.errors import UserError
from valence.rollouts import vllm_plugin
from valence.rollouts.client import POLL_SECONDS, ServerClient
from valence.rollouts.vllm_plugin import free_port
from valence.storage import make_folder, open_file

PYTHON = "VALENCE_VLLM_PYTHON"
"""Environment variable with the Python of an environment that has vLLM."""

LOOPBACK = "127.0.0.1"

GRACE_SECONDS = 10.0
"""Time for a server to stop by itself."""

REQUIRED_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for new weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that a server needs."""

CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default nearly all memory
    "TORCHDYNAMO_DISABLE": "1",  # the first request would wait for a compiler
    # threads that spin slow down a shared machine several times
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Default environment variables of a server on a CPU."""

TRAINER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
    # vLLM's sleep mode does not support expandable segments
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
"""Variables of the processes of a run, which a server must not inherit."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""

GUARD = f"""
import os, signal, subprocess, sys, threading, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
ending = threading.Event()
def watch():
    sys.stdin.buffer.read()  # ends when the parent has ended, for whatever reason
    ending.set()
signal.signal(signal.SIGTERM, lambda *_: ending.set())
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then stops this process
threading.Thread(target=watch, daemon=True).start()
while child.poll() is None and not ending.wait(0.05):
    pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGTERM)
deadline = time.monotonic() + {GRACE_SECONDS}
while child.poll() is None and time.monotonic() < deadline:
    time.sleep(0.02)
if ending.is_set():
    os.killpg(0, signal.SIGKILL)
os._exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""
"""Runs a command in a process group, and ends the group when the parent process ends."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of a server that a run starts on a machine with GPUs.

    devices: their numbers, as PyTorch counts the GPUs of this process. is_shared: whether a
    training process has one of them too. sleeps: whether the server frees its memory while the
    policy is trained. transport: how it receives weights.
    """

    devices: tuple[int, ...]
    is_shared: bool
    sleeps: bool
    transport: str


def place_server(
    devices: Sequence[int] | None,
    sleep: bool | Literal["auto"],
    transport: str,
    *,
    ahead: bool,
    has_adapter: bool,
    num_processes: int,
    num_devices: int,
) -> Placement:
    """Choose what the settings ``rollout.devices``, ``sleep`` and ``transport`` leave open.

    ahead: whether the server samples while the policy is trained. num_processes: training processes
    on this machine, which have the first GPUs. num_devices: GPUs of this machine. Raises UserError
    for GPUs that do not exist or cannot be shared.
    """
    if devices is None:
        devices = (num_processes,) if num_processes < num_devices else (0,)
    if missing := [device for device in devices if device >= num_devices]:
        raise UserError(
            f"GPU {missing[0]} (counted from 0) does not exist: the number of GPUs is "
            f"{num_devices}",
            code="rollout-device-missing",
            where="rollout.devices",
            fix="name GPUs that this run can use, or remove it",
        )
    shared = [device for device in devices if device < num_processes]
    if shared and (sleep is False or ahead):
        reason = "rollout.ahead: true" if ahead else "rollout.sleep: false"
        raise UserError(
            f"the server and a training process would use the memory of GPU {shared[0]} at the "
            f"same time because of {reason}",
            code="rollout-device-shared",
            where="rollout.devices",
            fix=f"set it to GPUs without a training process, or remove {reason}",
        )
    if shared and transport == "nccl":
        raise UserError(
            f"NCCL cannot connect two processes on GPU {shared[0]}",
            code="rollout-transport-unsupported",
            where="rollout.transport",
            fix="set it to auto or ipc, or set rollout.devices to GPUs without a training process",
        )
    is_local = tuple(devices) == (0,)
    if transport == "ipc" and not is_local:
        raise UserError(
            "rollout.transport: ipc needs the server on GPU 0, where rank 0 trains",
            code="rollout-transport-unsupported",
            where="rollout.transport",
            fix="set it to auto, or set rollout.devices: [0]",
        )
    if transport == "auto":
        full = "ipc" if is_local else "disk" if shared else "nccl"
        transport = "lora" if has_adapter else full
    sleeps = bool(shared) if sleep == "auto" else sleep
    return Placement(tuple(devices), bool(shared), sleeps, transport)


class Server:
    """A vLLM server of one model on this machine, as a context manager.

    model: folder or hub id. folder: for its log. python: of an environment that has vLLM; default:
    VALENCE_VLLM_PYTHON, or this one. transport: how it receives weights; None: it does not, and
    serves the model as `vllm serve` does. rank: of the largest
    adapter, with transport lora. dtype: of its weights. length: maximum tokens of prompt and
    completion. devices: numbers of its GPUs among those of this process. memory_share: of their
    memory; default: vLLM's. sleeps: whether it can free that memory. timeout: seconds until it must
    be ready. extra: further arguments.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        folder: Path,
        python: str | Path | None = None,
        transport: str | None = "disk",
        rank: int = 16,
        dtype: str = "auto",
        length: int | None = None,
        devices: Sequence[int] = (),
        memory_share: float | None = None,
        sleeps: bool = False,
        timeout: float = 600.0,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # it runs in a separate folder, so that it imports no files next to the recipe
        self.python = os.path.abspath(python or os.environ.get(PYTHON) or sys.executable)
        self.folder, self.timeout = Path(folder).absolute(), timeout
        self.port = free_port(LOOPBACK)
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._client = ServerClient(self.url, timeout)
        self.is_cpu = is_cpu_build(self.python)
        self.arguments = server_arguments(
            absolute_model(model), transport, rank, dtype, length, is_cpu=self.is_cpu
        )
        if len(devices) > 1:
            self.arguments += ["--tensor-parallel-size", str(len(devices))]
        if memory_share is not None:
            self.arguments += ["--gpu-memory-utilization", f"{memory_share:g}"]
        if sleeps:
            self.arguments.append("--enable-sleep-mode")
        self.arguments += extra
        self.environment = {**visible_devices(devices), **(environment or {})}
        if transport == "ipc":
            # vLLM reads the handles of GPU memory from a pickle, which only this process sends
            self.environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.folder / "vllm.log"
        self._log_file: IO[bytes] | None = None

    def start(self) -> Server:
        """Start the server and block until it is ready.

        Raises UserError with the end of its log if it stops, or takes too long.
        """
        make_folder(self.folder, self.folder.parent)
        self._log_file = open_file(self.log, self.folder, append=True)
        command = [
            self.python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--port",
            str(self.port),
            *self.arguments,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=self.variables(),
            cwd=self.folder,
            start_new_session=True,
        )
        atexit.register(self.stop)
        self._wait_until_ready()
        return self

    def revive(self) -> None:
        """Restart the server unless it is healthy."""
        if self.process is None or self.process.poll() is not None or not self._client.is_healthy():
            self.stop()
            self.start()

    def stop(self) -> None:
        """End the server and all its processes. Raises nothing, and may be called again."""
        atexit.unregister(self.stop)
        process, self.process = self.process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(2 * GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log_file is not None:
            self._log_file.close()

    def tail(self) -> str:
        """The last 15 lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def variables(self) -> dict[str, str]:
        """The environment variables of the server's process."""
        inherited = {k: v for k, v in os.environ.items() if k not in TRAINER_VARIABLES}
        plugin = plugin_folder(self.folder / "plugin")
        return {
            **(CPU_VARIABLES if self.is_cpu else {}),
            **inherited,
            **REQUIRED_VARIABLES,
            "PYTHONPATH": str(plugin),
            **self.environment,
        }

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.timeout
        assert self.process is not None
        while self.process.poll() is None:
            if self._client.is_healthy():
                return
            if time.monotonic() > deadline:
                tail = self.tail()
                self.stop()
                raise UserError(
                    f"the vLLM server is not ready after {self.timeout:g} s; its log ends "
                    f"with\n{tail}",
                    code="rollout-server-not-started",
                    where=str(self.log),
                    fix="fix the error in its log, or raise rollout.timeout if it is still loading",
                )
            time.sleep(POLL_SECONDS)
        code = self.process.returncode
        self.stop()
        raise UserError(
            f"the vLLM server stopped while starting (status {code}); its log ends "
            f"with\n{self.tail()}",
            code="rollout-server-stopped",
            where=str(self.log),
            fix="fix the error in its log; to start it manually: "
            f"{self.python} -m vllm.entrypoints.openai.api_server {' '.join(self.arguments)}",
        )


def visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """The variable that shows a process only these GPUs of this process; none: as they are."""
    if not devices:
        return {}
    visible = os.environ.get(VISIBLE_DEVICES)
    names = visible.split(",") if visible else {number: str(number) for number in devices}
    return {VISIBLE_DEVICES: ",".join(names[number].strip() for number in devices)}


def absolute_model(name: str | Path) -> str:
    """The absolute path of a folder; a hub id is unchanged."""
    return os.path.abspath(name) if Path(name).exists() else str(name)


def server_arguments(
    model: str, transport: str | None, rank: int, dtype: str, length: int | None, *, is_cpu: bool
) -> list[str]:
    """Command-line arguments of a server that exchanges tokens, log-probabilities and weights
    unchanged; without transport, of one with vLLM's defaults.
    """
    arguments = ["--model", model, "--host", LOOPBACK, "--dtype", dtype]
    if transport is not None:
        arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        arguments += ["--generation-config", "vllm"]
    if length is not None:
        arguments += ["--max-model-len", str(length)]
    if transport == "lora":
        max_rank = next((r for r in LORA_RANKS if r >= rank), rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(max_rank)]
        arguments += ["--max-loras", "2", "--max-cpu-loras", "4"]
    elif transport is not None:
        arguments += ["--weight-transfer-config", f'{{"backend": "{transport}"}}']
    if is_cpu:
        # vLLM 0.32 crashes on a CPU when a prompt is split: it cannot rewind the random numbers
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return arguments


def plugin_folder(folder: Path) -> Path:
    """Make a folder that installs the plugin when it is on a server's path, even if Valence is not
    installed there.
    """
    dist_info = folder / "valence_vllm-0.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(vllm_plugin.__file__, folder / "valence_vllm.py")
    (dist_info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: valence-vllm\nVersion: 0\n", encoding="utf-8"
    )
    (dist_info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nvalence_here = valence_vllm:register\n", encoding="utf-8"
    )
    return folder


PRINT_VERSION = (
    "from importlib.metadata import version as v, packages_distributions as p; "
    "n=p()['vllm'][0]; print(n, v(n))"
)


def is_cpu_build(python: str) -> bool:
    """Whether the vLLM of this Python was built for CPUs. Raises UserError if there is none."""
    fix = (
        f"set rollout.python or the environment variable {PYTHON} to the Python of an environment "
        f"with vLLM (`make vllm` builds one for CPUs)"
    )
    try:
        process = subprocess.run(
            [python, "-c", PRINT_VERSION],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"this Python cannot be run: {error}", code="python-not-runnable", where=python, fix=fix
        ) from error
    if process.returncode:
        raise UserError(
            "vLLM is not installed for this Python", code="library-missing", where=python, fix=fix
        )
    name, version = process.stdout.split()
    return name == "vllm-cpu" or version.endswith("+cpu")
