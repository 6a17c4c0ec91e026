"""What a machine has for training and what it lacks: libraries, devices, folders, settings of the
environment.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from valence.distributed.process_group import available_backends
from valence.errors import install_command
from valence.models import speed
from valence.models.memory import free_memory
from valence.network import ask_hub
from valence.version import __version__

State = Literal["ok", "missing", "problem"]
GB = 1e9
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "gguf": (("gguf",), "weights of a GGUF file (model.gguf_file)"),
    "eightbit": (
        ("bitsandbytes",),
        "4-bit weights and 8-bit moments (model.quantize, train.optimizer: adamw_8bit)",
    ),
    "liger": (("liger_kernel",), "the head backend liger (VALENCE_HEAD=liger)"),
    "serve": (("fastapi", "uvicorn", "prometheus_client"), "`valence serve-reward`"),
    "rewards": (
        ("math_verify", "jsonschema", "vaderSentiment"),
        "the rewards maths, json_schema and vader",
    ),
    "tensorboard": (("tensorboard",), "run.sinks: tensorboard"),
    "wandb": (("wandb",), "run.sinks: wandb"),
    "trackio": (("trackio",), "run.sinks: trackio"),
    "mlflow": (("mlflow",), "run.sinks: mlflow"),
}
"""Extras of the installation: what they import, and what it is for."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "TOKENIZERS_PARALLELISM",
    "VALENCE_NATIVE",
    "VALENCE_HEAD",
    "VALENCE_DEADLINE",
    "VALENCE_VLLM_PYTHON",
    "WORLD_SIZE",
    "RANK",
    "VALENCE_DTYPE",
)
"""Those that change what a run does or how fast; secrets are not among them."""


@dataclass(frozen=True)
class Check:
    """One line. missing: something optional is not there.

    ``needed``: nothing works, or a recipe does not, until it is mended.
    """

    about: str
    name: str
    state: State
    said: str
    fix: str = ""
    needed: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(*, network: bool = False) -> Iterator[Check]:
    """Everything that is not about one recipe, in the order of the table."""
    yield from _machine()
    yield from _libraries()
    yield from _devices()
    yield from _tools()
    yield from _folders()
    yield from _environment(os.environ)
    yield _hub() if network else Check("network", "hub", "ok", "not asked; --network asks it")


def _machine() -> Iterator[Check]:
    cores, usable = (
        os.cpu_count() or 1,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    )
    yield Check("machine", "python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield Check(
        "machine", "system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    fewer = f", of which this process may use {usable}" if usable not in (None, cores) else ""
    yield Check("machine", "cores", "ok", f"{cores}{fewer}")
    memory, disk = free_memory(torch.device("cpu")), shutil.disk_usage(".").free
    if memory is not None:
        few = Check(
            "machine",
            "memory free",
            "problem",
            f"{memory / GB:.1f} GB",
            "end other programs: a model needs more",
        )
        yield (
            few if memory < GB else Check("machine", "memory free", "ok", f"{memory / GB:.1f} GB")
        )
    few = Check(
        "machine",
        "disk free",
        "problem",
        f"{disk / GB:.1f} GB",
        "make room: a checkpoint needs more",
    )
    yield (
        few
        if disk < GB
        else Check("machine", "disk free", "ok", f"{disk / GB:.1f} GB in this folder")
    )


def _libraries() -> Iterator[Check]:
    # a clone on PYTHONPATH has no metadata
    yield Check("libraries", "valence", "ok", __version__)
    for name in ("torch", "transformers", "peft", "plotly"):
        try:
            # The version that PyTorch itself gives also says which CUDA it was built for.
            yield Check(
                "libraries", name, "ok", torch.__version__ if name == "torch" else version(name)
            )
        except PackageNotFoundError:
            yield Check(
                "libraries", name, "problem", "not installed", f"pip install {name}", needed=True
            )
    lacking = {
        extra: [each for each in modules if find_spec(each) is None]
        for extra, (modules, _) in EXTRAS.items()
    }
    if there := [extra for extra, modules in lacking.items() if not modules]:
        yield Check("libraries", "extras", "ok", ", ".join(there))
    for extra, modules in lacking.items():
        if modules:
            said = f"{', '.join(modules)} not installed: for {EXTRAS[extra][1]}"
            yield Check("libraries", extra, "missing", said, install_command(extra))


def _devices() -> Iterator[Check]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            narrow = (
                "" if torch.cuda.is_bf16_supported(including_emulation=False) else "no "
            ) + "bfloat16 in hardware"
            free = free_memory(torch.device("cuda", index)) or 0
            said = (
                f"{facts.name}, {free / GB:.1f} of {facts.total_memory / GB:.1f} GB free, {narrow}"
            )
            yield Check("devices", f"cuda:{index}", "ok", said)
    elif shutil.which("nvidia-smi"):
        what = (
            f"there is a driver, but this torch "
            f"{'cannot use it' if torch.version.cuda else 'is for CPUs'}"
        )
        yield Check(
            "devices",
            "cuda",
            "problem",
            what,
            "install the torch that fits the driver, as pytorch.org tells",
        )
    else:
        yield Check(
            "devices",
            "cuda",
            "missing",
            "no NVIDIA GPU: training runs on the CPU, which is for small models",
        )
    if torch.backends.mps.is_available():
        yield Check("devices", "mps", "ok", "Apple's GPU")
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    slow = speed.slow(torch.device("cpu"), torch.bfloat16)
    if slow:
        yield Check("devices", "cpu", "ok", f"{cpu}; {slow}")
    else:
        yield Check("devices", "cpu", "ok", f"{cpu}, bfloat16 in hardware")


def _tools() -> Iterator[Check]:
    compiler = shutil.which("g++")
    if compiler:
        yield Check("tools", "C++ compiler", "ok", compiler)
    else:
        purpose = (
            "no g++: layers are not compiled (train.compile), nor the kernels for CPUs "
            "with bfloat16"
        )
        yield Check(
            "tools",
            "C++ compiler",
            "missing",
            purpose,
            "install g++ with the system's package manager",
        )
    for name, there in available_backends().items():
        if there:
            yield Check("tools", name, "ok", "for several processes (--nproc)")
        elif name == "gloo" or torch.cuda.is_available():
            fix = "install a torch that has it"
            yield Check("tools", name, "missing", "several processes (--nproc) need it", fix)


def _folders() -> Iterator[Check]:
    from huggingface_hub import constants

    places = {
        "runs": Path("runs"),
        "models (HF_HOME)": Path(constants.HF_HOME),
        "temporary": Path(tempfile.gettempdir()),
    }
    mine = "a folder that you may write to"
    fixes = (f"work in {mine}, or set run.dir", f"set HF_HOME to {mine}", f"set TMPDIR to {mine}")
    for (name, folder), fix in zip(places.items(), fixes, strict=True):
        yield writable("folders", name, folder, fix, needed=name == "temporary")


def writable(about: str, name: str, folder: Path, fix: str, *, needed: bool = False) -> Check:
    """Writes a file there and removes it; where the folder does not exist, in the nearest one above
    it that does.
    """
    there = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if os.path.exists(each)
    )
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".valence-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        return Check(
            about,
            name,
            "problem",
            f"{folder} cannot be written ({error.strerror})",
            fix,
            needed=needed,
        )
    return Check(
        about,
        name,
        "ok",
        f"{folder}" + ("" if there == folder.absolute() else ", which will be made"),
    )


def _environment(variables: Mapping[str, str]) -> Iterator[Check]:
    for name in VARIABLES:
        value = variables.get(name)
        if value is None:
            continue
        what, fix = _odd(name, value)
        yield Check(
            "environment",
            name,
            "problem" if what else "ok",
            f"{value!r}" + (f": {what}" if what else ""),
            fix,
        )
    cores = os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in variables and torch.get_num_threads() == 1 < cores:
        yield Check(
            "environment",
            "OMP_NUM_THREADS",
            "problem",
            f"not set, and one of {cores} cores is used",
            f"set it to {cores}",
        )


def _odd(name: str, value: str) -> tuple[str, str]:
    """What is odd about the value of a variable, and what mends it; nothing for most."""
    cores = os.cpu_count() or 1
    if name == "OMP_NUM_THREADS" and (not value.isdecimal() or not 0 < int(value) <= cores):
        return f"this machine has {cores} cores", "set it to the cores that each process may use"
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
        return "hides all GPUs", "unset it to use them"
    if name == "VALENCE_NATIVE" and value == "0":
        return "kernels for CPUs with bfloat16 are off", "unset it"
    return "", ""


def _hub() -> Check:
    """Whether the hub that models come from answers."""
    from huggingface_hub import constants

    fix = (
        "models and data then have to be in folders or in the cache (HF_HOME); behind a proxy "
        "set HTTPS_PROXY"
    )
    if constants.HF_HUB_OFFLINE:
        return Check(
            "network",
            "hub",
            "missing",
            "not asked: HF_HUB_OFFLINE is set",
            "unset it to download models",
        )
    said = ask_hub()
    if not said:
        return Check("network", "hub", "ok", f"{constants.ENDPOINT} answers")
    return Check("network", "hub", "problem", f"{constants.ENDPOINT}: {said}", fix)
