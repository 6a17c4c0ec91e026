"""Nested state on disk: tensors as safetensors, all else as JSON, written aside and renamed, so that it is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from valence.errors import UserError

TENSOR = "__tensor__"


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``target`` when the block ends well. An older ``target`` is replaced at that moment.

    Raises UserError when it cannot be written; nothing half-written is left behind.
    """
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        _keep(aside, target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be written ({error})", where=str(target), fix="make room, or choose another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _keep(aside: Path, target: Path) -> None:
    """Renames a filled folder, once its files are on the disk."""
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(aside.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~mask)  # safetensors writes for the owner alone
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)


def save(state: dict[str, Any], target: Path) -> None:
    """Writes a nested dict of tensors, numbers, strings, lists and None as a folder."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach().cpu().contiguous().clone()
            return {TENSOR: path}
        if isinstance(value, dict):
            # Keys may be integers (optimizer states): kept as pairs.
            return {"__dict__": [[key, plain(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}/{i}") for i, item in enumerate(value)]
        return value

    described = plain(state, "")
    with written_aside(target) as folder:
        save_file(tensors, folder / "tensors.safetensors")
        (folder / "state.json").write_text(json.dumps(described))


def load(folder: Path) -> dict[str, Any]:
    """What ``save`` wrote. Raises UserError when the folder does not hold it."""
    try:
        described = json.loads((folder / "state.json").read_text())
        tensors = load_file(folder / "tensors.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(f"this is not a whole checkpoint ({error})", where=str(folder), fix="use another one") from error

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return [rich(item) for item in value]
        if isinstance(value, dict):
            return tensors[value[TENSOR]] if TENSOR in value else {key: rich(item) for key, item in value["__dict__"]}
        return value

    return rich(described)


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
