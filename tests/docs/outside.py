"""Programs of others that pages name, run here with what this machine has: launchers with two processes, the batch scripts of
Slurm by stand-ins for its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.docs.blocks import ROOT

PYTHON = shlex.quote(sys.executable)
PROCESSES = re.compile(r"(?<=--)(nproc|nproc-per-node|num_processes)( +)\d+")
PROGRAMS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
}
SLURM = {
    "sbatch": 'exec bash "$@"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else exit 1; fi',
    "valence": f'exec {PYTHON} -m valence "$@"',
}
JOB = {
    "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0",
    "SLURM_NTASKS_PER_NODE": "1",
}  # fmt: skip


def stand_ins(folder: Path, commands: Mapping[str, str], job: Mapping[str, str] = JOB) -> dict[str, str]:
    """Writes commands in shell into a folder. The environment in which they are found, and in which a job of Slurm runs."""
    folder.mkdir(exist_ok=True)
    for name, code in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    return os.environ | job | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


class Outside:
    """Runs such lines in the current folder, in their order. Of several hosts each is started, and all are waited for at last."""

    def __init__(self) -> None:
        self.hosts: list[subprocess.Popen[bytes]] = []

    def run(self, line: str) -> None:
        """Raises AssertionError where the program fails."""
        program, *words = shlex.split(line)
        if program == "sbatch":
            environment = stand_ins(Path("slurm commands"), SLURM)
            words[0] = str(ROOT / words[0])
            assert subprocess.run([program, *words], env=environment, timeout=120).returncode == 0, line
            return
        self.hosts.append(subprocess.Popen([*PROGRAMS[program], *words]))
        if len(self.hosts) == _hosts(words):
            codes = [host.wait(120) for host in self.hosts]
            self.hosts.clear()
            assert not any(codes), line

    def end(self) -> None:
        for host in self.hosts:
            host.kill()
            host.wait()


def smaller(line: str) -> str:
    """A command of many processes as one of two: two on this host, or one on each of two that both are this host."""
    each = "1" if "--nnodes" in line else "2"
    return PROCESSES.sub(rf"\g<1>\g<2>{each}", line).replace("node1", "127.0.0.1")


def _hosts(words: list[str]) -> int:
    return int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
