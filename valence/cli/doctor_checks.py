"""Check a machine: libraries, devices, tools, folders and environment variables."""

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
from valence.models.dtypes import slow_dtype
from valence.models.memory import free_memory
from valence.network import ask_hub
from valence.version import __version__

State = Literal["ok", "missing", "problem"]
GB = 1e9
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "gguf": (("gguf",), "reading GGUF files (model.gguf_file)"),
    "eightbit": (
        ("bitsandbytes",),
        "4-bit weights and 8-bit optimizer state (model.quantize, train.optimizer: adamw_8bit)",
    ),
    "serve": (
        ("fastapi", "uvicorn", "prometheus_client"),
        "`valence serve`, `valence collect` and `valence audit --review`",
    ),
    "lm-eval": (("lm_eval",), "`valence compare --lm-eval-tasks`"),
    "optuna": (("optuna",), "`valence sweep --search optuna`"),
    "rewards": (
        ("math_verify", "jsonschema", "vaderSentiment"),
        "the rewards maths, json_schema and vader",
    ),
    "tensorboard": (("tensorboard",), "run.sinks: tensorboard"),
    "wandb": (("wandb",), "run.sinks: wandb"),
    "trackio": (("trackio",), "run.sinks: trackio"),
    "mlflow": (("mlflow",), "run.sinks: mlflow"),
}
"""The modules and the purpose of each extra of the package."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "TOKENIZERS_PARALLELISM",
    "VALENCE_NATIVE",
    "VALENCE_HEAD",
    "VALENCE_ATTENTION",
    "VALENCE_DEADLINE",
    "VALENCE_VLLM_PYTHON",
    "WORLD_SIZE",
    "RANK",
    "VALENCE_DTYPE",
)
"""Environment variables that change the result or the speed of a run; no secrets."""


@dataclass(frozen=True)
class Check:
    """The result of one check. missing: something optional is not there.

    ``needed``: nothing works, or the recipe does not, until the problem is fixed.
    """

    section: str
    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The check with the keys of the JSON output, which programs read."""
        json_keys = {"section": "about", "detail": "said"}
        return {json_keys.get(name, name): value for name, value in asdict(self).items()}


def examine(*, network: bool = False) -> Iterator[Check]:
    """All checks that do not depend on a recipe, in the order of the table."""
    yield from _machine()
    yield from _libraries()
    yield from _devices()
    yield from _tools()
    yield from _folders()
    yield from _environment(os.environ)
    yield (
        _hub()
        if network
        else Check("network", "hub", "ok", "not checked; add --network to check it")
    )


def _machine() -> Iterator[Check]:
    cores, usable = (
        os.cpu_count() or 1,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    )
    yield Check("machine", "python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield Check(
        "machine", "system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    limit = f", of which this process can use {usable}" if usable not in (None, cores) else ""
    yield Check("machine", "cores", "ok", f"{cores}{limit}")
    memory, disk = free_memory(torch.device("cpu")), shutil.disk_usage(".").free
    if memory is not None:
        low_memory = Check(
            "machine",
            "memory free",
            "problem",
            f"{memory / GB:.1f} GB",
            "close other programs; training needs more memory",
        )
        yield (
            low_memory
            if memory < GB
            else Check("machine", "memory free", "ok", f"{memory / GB:.1f} GB")
        )
    low_disk = Check(
        "machine",
        "disk free",
        "problem",
        f"{disk / GB:.1f} GB",
        "free disk space; checkpoints need more",
    )
    yield (
        low_disk
        if disk < GB
        else Check("machine", "disk free", "ok", f"{disk / GB:.1f} GB in this folder")
    )


def _libraries() -> Iterator[Check]:
    # not from the metadata, which a clone on PYTHONPATH does not have
    yield Check("libraries", "valence", "ok", __version__)
    for name in ("torch", "transformers", "peft", "plotly"):
        try:
            # torch.__version__ includes the CUDA version
            yield Check(
                "libraries", name, "ok", torch.__version__ if name == "torch" else version(name)
            )
        except PackageNotFoundError:
            yield Check(
                "libraries", name, "problem", "not installed", f"pip install {name}", needed=True
            )
    lacking = {
        extra: [module for module in modules if find_spec(module) is None]
        for extra, (modules, _) in EXTRAS.items()
    }
    if installed := [extra for extra, modules in lacking.items() if not modules]:
        yield Check("libraries", "extras", "ok", ", ".join(installed))
    for extra, modules in lacking.items():
        if modules:
            detail = f"{', '.join(modules)} not installed; needed for {EXTRAS[extra][1]}"
            yield Check("libraries", extra, "missing", detail, install_command(extra))


def _devices() -> Iterator[Check]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            bfloat16 = (
                "" if torch.cuda.is_bf16_supported(including_emulation=False) else "no "
            ) + "bfloat16 in hardware"
            free = free_memory(torch.device("cuda", index)) or 0
            memory = f"{free / GB:.1f} of {facts.total_memory / GB:.1f} GB free"
            detail = f"{facts.name}, {memory}, {bfloat16}"
            yield Check("devices", f"cuda:{index}", "ok", detail)
    elif shutil.which("nvidia-smi"):
        problem = (
            f"an NVIDIA driver is installed, but this torch "
            f"{'cannot use it' if torch.version.cuda else 'was built for CPUs'}"
        )
        yield Check(
            "devices",
            "cuda",
            "problem",
            problem,
            "install a torch build for this driver (https://pytorch.org/get-started/locally)",
        )
    else:
        yield Check(
            "devices",
            "cuda",
            "missing",
            "no NVIDIA GPU: training runs on the CPU, which is only practical for small models",
        )
    if torch.backends.mps.is_available():
        yield Check("devices", "mps", "ok", "Apple GPU")
    num_threads = torch.get_num_threads()
    unit = "thread" if num_threads == 1 else "threads"
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {num_threads} {unit}"
    slow = slow_dtype(torch.device("cpu"), torch.bfloat16)
    if slow:
        yield Check("devices", "cpu", "ok", f"{cpu}; {slow}")
    else:
        yield Check("devices", "cpu", "ok", f"{cpu}, bfloat16 in hardware")


def _tools() -> Iterator[Check]:
    compiler = shutil.which("g++")
    if compiler:
        yield Check("tools", "C++ compiler", "ok", compiler)
    else:
        detail = (
            "no g++: without it, layers (train.compile) and the bfloat16 kernels for CPUs are not "
            "compiled"
        )
        yield Check(
            "tools",
            "C++ compiler",
            "missing",
            detail,
            "install g++ with the system's package manager",
        )
    for name, is_available in available_backends().items():
        if is_available:
            yield Check("tools", name, "ok", "for several processes (--nproc)")
        elif name == "gloo" or torch.cuda.is_available():
            fix = f"install a torch build with {name}"
            yield Check("tools", name, "missing", "needed for several processes (--nproc)", fix)


def _folders() -> Iterator[Check]:
    from huggingface_hub import constants

    folders = {
        "runs": Path("runs"),
        "models (HF_HOME)": Path(constants.HF_HOME),
        "temporary": Path(tempfile.gettempdir()),
    }
    writable_folder = "a folder where you have write permission"
    fixes = (
        f"change to {writable_folder}, or set run.dir to one",
        f"set HF_HOME to {writable_folder}",
        f"set TMPDIR to {writable_folder}",
    )
    for (name, folder), fix in zip(folders.items(), fixes, strict=True):
        yield check_writable("folders", name, folder, fix, needed=name == "temporary")


def check_writable(
    section: str, name: str, folder: Path, fix: str, *, needed: bool = False
) -> Check:
    """Write a temporary file into the folder, or into its nearest parent that exists."""
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path)
    )
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".valence-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        return Check(
            section,
            name,
            "problem",
            f"{folder} cannot be written ({error.strerror})",
            fix,
            needed=needed,
        )
    return Check(
        section,
        name,
        "ok",
        f"{folder}" + ("" if nearest == folder.absolute() else ", which will be created"),
    )


def _environment(variables: Mapping[str, str]) -> Iterator[Check]:
    for name in VARIABLES:
        value = variables.get(name)
        if value is None:
            continue
        problem, fix = _variable_problem(name, value)
        yield Check(
            "environment",
            name,
            "problem" if problem else "ok",
            f"{value!r}" + (f": {problem}" if problem else ""),
            fix,
        )
    cores = os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in variables and torch.get_num_threads() == 1 < cores:
        yield Check(
            "environment",
            "OMP_NUM_THREADS",
            "problem",
            f"not set, and torch uses only one of {cores} cores",
            f"set it to {cores}",
        )


def _variable_problem(name: str, value: str) -> tuple[str, str]:
    """The problem with the value of a variable and its fix; empty strings if there is none."""
    cores = os.cpu_count() or 1
    if name == "OMP_NUM_THREADS" and (not value.isdecimal() or not 0 < int(value) <= cores):
        return (
            f"this machine has {cores} cores",
            f"set it to the number of cores per process, at most {cores}",
        )
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
        return "hides all GPUs", "unset it to use them"
    if name == "VALENCE_NATIVE" and value == "0":
        return "turns off the bfloat16 kernels for CPUs", "unset it to use them"
    return "", ""


def _hub() -> Check:
    """Check whether the Hugging Face hub can be reached."""
    from huggingface_hub import constants

    fix = (
        "check the network, and behind a proxy set HTTPS_PROXY; offline, use local folders and "
        "models in the cache (HF_HOME)"
    )
    if constants.HF_HUB_OFFLINE:
        return Check(
            "network",
            "hub",
            "missing",
            "not checked: HF_HUB_OFFLINE is set",
            "unset it to download models",
        )
    problem = ask_hub()
    if not problem:
        return Check("network", "hub", "ok", f"{constants.ENDPOINT} answers")
    return Check("network", "hub", "problem", f"{constants.ENDPOINT}: {problem}", fix)
