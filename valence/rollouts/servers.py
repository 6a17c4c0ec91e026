"""Starting a vLLM server for a run, and stopping it whatever happens to the run."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from valence.errors import UserError
from valence.files import make_folder, open_file
from valence.rollouts import vllm_plugin
from valence.rollouts.vllm_plugin import free
from valence.rollouts.wire import POLL, Wire

PYTHON = "VALENCE_VLLM_PYTHON"
"""Names the Python of an environment that has vLLM."""

LOOPBACK = "127.0.0.1"

GRACE = 10.0
"""Seconds that a server has to stop by itself."""

ANYWHERE = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for new weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What a server cannot do its work without."""

ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default nearly all memory
    "TORCHDYNAMO_DISABLE": "1",  # the first request would wait for a compiler
    # threads that wait by spinning slow a shared machine several times over
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
}
"""What suits a server on a CPU, unless the environment says otherwise."""

OF_TRAINERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
)
"""Say who a process is among those of a run; a server is none of them."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters that a server can be told to leave room for."""

GUARD = f"""
import os, signal, subprocess, sys, threading, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
ending = threading.Event()
def watch():
    sys.stdin.buffer.read()  # ends when the one who started this has ended, however that was
    ending.set()
signal.signal(signal.SIGTERM, lambda *_: ending.set())
signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the run, which then stops this
threading.Thread(target=watch, daemon=True).start()
while child.poll() is None and not ending.wait(0.05):
    pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGTERM)
until = time.monotonic() + {GRACE}
while child.poll() is None and time.monotonic() < until:
    time.sleep(0.02)
if ending.is_set():
    os.killpg(0, signal.SIGKILL)
os._exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""
"""Runs a command in a group of processes of its own, and ends the whole group with the process that
started it.
"""


class Server:
    """A vLLM server on this machine, of one model.

    Use it in a ``with`` block, or call ``start`` and ``stop``.

    model: folder or hub id. folder: for its log. python: of an environment that has vLLM; default:
    VALENCE_VLLM_PYTHON, or this one. transport: how it will be sent weights. rank: of the largest
    adapter, with transport lora. dtype: of its weights.
    length: the longest prompt and answer together, in tokens. timeout: seconds until it must be up.
    extra: further arguments.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        folder: Path,
        python: str | Path | None = None,
        transport: str = "disk",
        rank: int = 16,
        dtype: str = "auto",
        length: int | None = None,
        timeout: float = 600.0,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # It runs in a folder of its own, so that nothing beside the recipe is taken for one of its
        # libraries.
        self.python = os.path.abspath(python or os.environ.get(PYTHON) or sys.executable)
        self.folder, self.timeout = Path(folder).absolute(), timeout
        self.port = free(LOOPBACK)
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._wire = Wire(self.url, timeout)
        self.cpu = without_gpu(self.python)
        self.arguments = arguments(
            located(model), transport, rank, dtype, length, cpu=self.cpu
        ) + list(extra)
        self.environment = dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.folder / "vllm.log"
        self._written: IO[bytes] | None = None

    def start(self) -> Server:
        """Starts it and waits until it answers.

        Raises UserError with the end of its log when it stops, or takes too long.
        """
        make_folder(self.folder, self.folder.parent)
        self._written = open_file(self.log, self.folder, append=True)
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
            stdout=self._written,
            stderr=subprocess.STDOUT,
            env=self.variables(),
            cwd=self.folder,
            start_new_session=True,
        )
        atexit.register(self.stop)
        self._wait()
        return self

    def revive(self) -> None:
        """Starts it again if it has stopped or is not well; one that is well is left alone."""
        if self.process is None or self.process.poll() is not None or not self._wire.healthy():
            self.stop()
            self.start()

    def stop(self) -> None:
        """Ends it and all its processes. Raises nothing, and may be called again."""
        atexit.unregister(self.stop)
        process, self.process = self.process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(2 * GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._written is not None:
            self._written.close()

    def tail(self) -> str:
        """The last 15 lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def variables(self) -> dict[str, str]:
        """The environment variables of the server's process."""
        own = {name: value for name, value in os.environ.items() if name not in OF_TRAINERS}
        plugin = plugin_folder(self.folder / "plugin")
        return {
            **(ON_CPU if self.cpu else {}),
            **own,
            **ANYWHERE,
            "PYTHONPATH": str(plugin),
            **self.environment,
        }

    def _wait(self) -> None:
        until = time.monotonic() + self.timeout
        assert self.process is not None
        while self.process.poll() is None:
            if self._wire.healthy():
                return
            if time.monotonic() > until:
                said = self.tail()
                self.stop()
                raise UserError(
                    f"the vLLM server is not up after {self.timeout:g} s; its log ends "
                    f"with\n{said}",
                    code="rollout-server-not-started",
                    where=str(self.log),
                    fix="raise rollout.timeout, or see what its log waits for",
                )
            time.sleep(POLL)
        code = self.process.returncode
        self.stop()
        raise UserError(
            f"the vLLM server stopped while starting (status {code}); its log ends "
            f"with\n{self.tail()}",
            code="rollout-server-stopped",
            where=str(self.log),
            fix=f"start it by hand: {self.python} -m vllm.entrypoints.openai.api_server "
            f"{' '.join(self.arguments)}",
        )


def located(name: str | Path) -> str:
    """A folder as seen from anywhere; a hub id as it is."""
    return os.path.abspath(name) if Path(name).exists() else str(name)


def arguments(
    model: str, transport: str, rank: int, dtype: str, length: int | None, *, cpu: bool
) -> list[str]:
    """The command-line arguments that a server needs so that tokens, log-probabilities and weights
    go in and out as they are.
    """
    out = ["--model", model, "--host", LOOPBACK, "--dtype", dtype, "--enable-scale-out"]
    out += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if length is not None:
        out += ["--max-model-len", str(length)]
    if transport == "lora":
        room = next((each for each in RANKS if each >= rank), rank)
        out += [
            "--enable-lora",
            "--max-lora-rank",
            str(room),
            "--max-loras",
            "2",
            "--max-cpu-loras",
            "4",
        ]
    else:
        out += ["--weight-transfer-config", f'{{"backend": "{transport}"}}']
    if cpu:
        # A prompt cut in two rewinds the random numbers of its answer, which vLLM 0.32 cannot do on
        # a CPU: its engine ends.
        out += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return out


def plugin_folder(folder: Path) -> Path:
    """A folder that, on a server's path, brings the plugin with it, whether or not Valence is
    installed there.
    """
    about = folder / "valence_vllm-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(vllm_plugin.__file__, folder / "valence_vllm.py")
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: valence-vllm\nVersion: 0\n", encoding="utf-8"
    )
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nvalence_here = valence_vllm:register\n", encoding="utf-8"
    )
    return folder


ASK = (
    "from importlib.metadata import version as v, packages_distributions as p; "
    "n=p()['vllm'][0]; print(n, v(n))"
)


def without_gpu(python: str) -> bool:
    """Whether the vLLM of this Python was built for CPUs. Raises UserError when it has none."""
    fix = (
        f"set rollout.python or {PYTHON} to the Python of an environment that has vLLM (`make "
        f"vllm` builds one for CPUs)"
    )
    try:
        done = subprocess.run(
            [python, "-c", ASK],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"it cannot be run: {error}", code="python-not-runnable", where=python, fix=fix
        ) from error
    if done.returncode:
        raise UserError("this Python has no vLLM", code="library-missing", where=python, fix=fix)
    name, version = done.stdout.split()
    return name == "vllm-cpu" or version.endswith("+cpu")
