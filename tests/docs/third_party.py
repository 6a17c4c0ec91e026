"""Third-party programs that pages name, run with the means of this machine: launchers with two
processes; a Slurm job and the pods of Kubernetes as local processes; Ray by a stand-in; the demo
with a tiny model; an installation next to its dependencies.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.docs.blocks import ROOT
from tests.programs import Copies

PYTHON = shlex.quote(sys.executable)
PROCESSES = re.compile(r"(--(?:nproc|nproc-per-node|num_processes)[ =]+)\d+")
HOST = re.compile(r"\bnode1\b|\bvalence-hosts-0-0\.valence\b")
SECONDS = 240
SLURM = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else exit 1; fi',
    "valence": 'echo $$ > "step of the job"; exec "$COPY" -m valence "$@"',
}
JOB = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS_PER_NODE": "1",
}
COMMANDS = {
    "torchrun": 'exec "$COPY" -m torch.distributed.run "$@"',
    "accelerate": 'exec "$COPY" -m accelerate.commands.accelerate_cli "$@"',
    "pip": f'PIP_NO_INDEX=1 exec {PYTHON} -m pip "$@"',  # what is installed is all that there is
    "python": 'exec "$COPY" -m tests.docs.ray_stub "$@"',
    "python3": f'exec {PYTHON} "$@"',
    "make": f"exec {shutil.which('make')} -f {shlex.quote(f'{ROOT}/Makefile')} -o .venv/.ready"
    f' BIN={shlex.quote(str(Path(sys.executable).parent))} "$@"',
}
OUTSIDE = (*(f"{name} " for name in COMMANDS), "source ", "sbatch ", "scancel ", "kubectl ")
"""How lines of such programs begin."""
COPIED = ("torchrun", "accelerate", "python", "sbatch", "kubectl")
"""Those that start training, here as copies.

That it starts from nothing, too, is tested in tests/distributed.
"""


def stand_ins(folder: Path, commands: Mapping[str, str]) -> dict[str, str]:
    """Writes commands in shell into a folder. The environment in which they are found."""
    folder.mkdir(exist_ok=True)
    for name, code in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder.absolute()}{os.pathsep}{os.environ['PATH']}"}


class Outside:
    """Runs such lines in the current folder, in their order. local: makes of a text one that fits
    this machine.
    """

    def __init__(self, local: Callable[[str], str]) -> None:
        self.local = local
        self.hosts: list[subprocess.Popen[bytes]] = []
        self.pods: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.job: subprocess.Popen[bytes] | None = None
        self.sourced = ""
        self.environment = stand_ins(Path("commands"), COMMANDS)
        self.copies: Copies | None = None

    def run(self, line: str, added: str = "") -> None:
        """Raises AssertionError where the program fails. added: words for Valence."""
        program, *words = shlex.split(line)
        if program in COPIED:
            self.environment["COPY"] = self.interpreter()
        if program == "sbatch":
            self.finish()
            command = [
                "bash",
                words[0],
                *shlex.split(self.local(shlex.join(words[1:]))),
                *added.split(),
            ]
            self.job = subprocess.Popen(
                command,
                env=stand_ins(Path("slurm"), SLURM) | JOB | {"COPY": self.environment["COPY"]},
            )
        elif program == "scancel":
            self._cancel(words)
        elif line.startswith("kubectl apply -f "):
            self._apply(YAML(typ="safe").load(Path(words[2]).read_text(encoding="utf-8")), added)
        elif line.startswith("kubectl logs --follow "):
            ended(self.pods.pop(words[2]), line)
            assert Path(f"{words[2]}-0.log").read_text()
        elif program == "source":
            self.sourced += f"{line}; "
        else:
            self._shell(self.local(line), added)

    def interpreter(self) -> str:
        """The path of a Python whose programs are copies."""
        if self.copies is None:
            self.copies = Copies()
        return str(self.copies.python)

    def finish(self) -> None:
        """Waits for a job that is under way."""
        if self.job:
            ended([self.job], "sbatch")
            self.job = None

    def end(self) -> None:
        for process in [
            *self.hosts,
            *(pod for pods in self.pods.values() for pod in pods),
            *([self.job] if self.job else []),
        ]:
            process.kill()
            process.wait()
        if self.copies is not None:
            self.copies.end()

    def _shell(self, line: str, added: str) -> None:
        """Of several hosts each is started, and all are waited for at last."""
        # A new environment finds here what it would have to install.
        results = {"PYTHONPATH": sysconfig.get_path("purelib"), "VALENCE_CACHE": "cache"}
        self.hosts.append(
            subprocess.Popen(
                ["bash", "-c", f"{self.sourced}{line} {added}"], env=self.environment | results
            )
        )
        count = re.search(r"--nnodes (\d+)", line)
        if len(self.hosts) == int(count[1] if count else 1):
            ended(self.hosts, line)
            self.hosts.clear()

    def _cancel(self, words: list[str]) -> None:
        """Signals the job's step, once that trains (in runs/slurm).

        The job must end as one that was stopped, and not be put back.
        """
        assert self.job
        until = time.monotonic() + SECONDS
        while (
            self.job.poll() is None
            and time.monotonic() < until
            and not any(Path("runs/slurm").glob("metrics.jsonl"))
        ):
            time.sleep(0.02)
        number = signal.Signals[f"SIG{words[0].removeprefix('--signal=')}"]
        os.kill(int(Path("step of the job").read_text()), number)
        ended([self.job], "scancel", 128 + number)
        self.job = None

    def _apply(self, manifest: Any, added: str) -> None:
        """Starts the pods of a JobSet."""
        for job in manifest["spec"]["replicatedJobs"]:
            name, hosts = (
                f"jobs/{manifest['metadata']['name']}-{job['name']}-0",
                job["template"]["spec"],
            )
            (container,) = hosts["template"]["spec"]["containers"]
            message = {
                item["name"]: self.local(f" {item['value']}").strip() for item in container["env"]
            }
            *shell, line = container["command"]
            Path("jobs").mkdir(exist_ok=True)
            for index in range(hosts["completions"]):
                environment = self.environment | message | {"JOB_COMPLETION_INDEX": str(index)}
                with Path(f"{name}-{index}.log").open("wb") as log:
                    pod = subprocess.Popen(
                        [*shell, f"{self.local(line)} {added}"], env=environment, stdout=log
                    )
                self.pods.setdefault(name, []).append(pod)


def ended(processes: list[subprocess.Popen[bytes]], line: str, status: int = 0) -> None:
    """Waits until all have ended. Raises AssertionError where one has another status."""
    assert {process.wait(SECONDS) for process in processes} == {status}, line


def smaller(line: str) -> str:
    """A command of many processes as one of two: two on this host, or one on each of two that both
    are this host.
    """
    item = "1" if "--nnodes" in line else "2"
    return HOST.sub("127.0.0.1", PROCESSES.sub(rf"\g<1>{item}", line)).replace(
        "recipe.yaml 16 ", "recipe.yaml 2 "
    )
