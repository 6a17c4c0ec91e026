"""Nested state as files: tensors as safetensors, all else as JSON. Folders are written aside and renamed: whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from valence.errors import UserError

UMASK = os.umask(0)
os.umask(UMASK)  # read once: for a moment it is another one, and saves have threads of their own
TENSOR, DICT = "__tensor__", "__dict__"
TENSORS, PLAIN = "tensors.safetensors", "state.json"


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
    """Renames a filled folder, once all of it is on the disk."""
    for path in sorted(aside.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~UMASK)  # safetensors writes for the owner alone
        synced(path)
    synced(aside)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    synced(target.parent)


def synced(path: Path) -> None:
    """Returns when a file, or the names in a folder, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(target: Path, content: bytes) -> None:
    """Writes a file that is there as a whole or, after a crash, as it was. Raises OSError."""
    aside = target.with_name(f".{target.name}.part")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(target)
    synced(target.parent)


class Snapshot:
    """Nested state as it is now: dicts, lists, tensors, numbers, strings and None, apart from what goes on changing.

    ``size``: bytes of its tensors. Raises UserError for anything else.
    """

    def __init__(self, state: Mapping[str, Any], *, copied: bool = True) -> None:
        """Without ``copied`` tensors that are on the host are used as they are: they must not change until it is written."""
        self._copied = copied
        self.tensors: dict[str, Tensor] = {}
        try:
            self.plain = json.dumps(self._described(state, ""))
        except TypeError as error:
            raise UserError(
                f"state that cannot be saved: {error}", where="checkpoint", fix="use numbers, texts and tensors"
            ) from error
        self.size = sum(tensor.nbytes for tensor in self.tensors.values())

    def _described(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = f"{len(self.tensors)}{path}"  # numbered: keys may hold the mark between them
            self.tensors[name] = value.detach().to("cpu", copy=self._copied).contiguous()
            return {TENSOR: name}
        if isinstance(value, Mapping):
            # Keys may be integers (optimizer states): kept as pairs.
            return {DICT: [[key, self._described(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return [self._described(item, f"{path}/{i}") for i, item in enumerate(value)]
        return value

    def write(self, folder: Path) -> None:
        """Writes two files into a folder. Raises OSError or SafetensorError."""
        save_file(_apart(self.tensors), folder / TENSORS)
        (folder / PLAIN).write_text(self.plain)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """No two of them in one piece of memory, which safetensors refuses."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen and tensor.nbytes else tensor
        seen.add(memory)
    return found


def load(folder: Path) -> dict[str, Any]:
    """The state that ``Snapshot.write`` wrote. Raises UserError when the folder does not hold it."""
    try:
        described = json.loads((folder / PLAIN).read_text())
        # Copies: views of the file would hold it, and its room on the disk, for as long as the run.
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / TENSORS).items()}
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"this is not a whole checkpoint ({error})", where=str(folder), fix="use another one") from error

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return [rich(item) for item in value]
        if isinstance(value, dict):
            return tensors[value[TENSOR]] if TENSOR in value else {key: rich(item) for key, item in value[DICT]}
        return value

    return rich(described)
