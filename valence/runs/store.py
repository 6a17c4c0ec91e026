"""Nested state as files: tensors as safetensors, all else as JSON.

Folders are written aside and renamed: whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError
from valence.files import open_file, refuse_links, write_all

UMASK = os.umask(0)
os.umask(UMASK)  # read once: for a moment it is another one, and saves have threads of their own
TENSOR, DICT = "__tensor__", "__dict__"
TENSORS, PLAIN = "tensors.safetensors", "state.json"
Write = Callable[[Path, Mapping[str, Tensor]], list[Path]]
"""Writes sharded tensors into a folder, all processes together: the files that this one wrote."""
Read = Callable[[Path, Mapping[str, Tensor]], None]
"""Fills tensors, whole or sharded, with those of these names in a folder."""


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``target`` when the block ends well.

    An older ``target`` is replaced at that moment.

    Raises UserError when it cannot be written, as through a symbolic link; nothing half-written is
    left behind.
    """
    aside = place_aside(target)
    for place in (aside, _place_of_old(target)):
        refuse_links(place, target.parent)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        _keep(aside, target)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot be written ({error})",
            code="file-not-writable",
            where=str(target),
            fix="make room, or choose another folder",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def place_aside(target: Path) -> Path:
    """Where a folder is filled before it gets its name."""
    return target.with_name(f".{target.name}.part")


def _place_of_old(target: Path) -> Path:
    """Where the folder that is replaced waits for the new one to get its name."""
    return target.with_name(f".{target.name}.old")


def _keep(aside: Path, target: Path) -> None:
    """Renames a filled folder, once all of it is on the disk."""
    for path in sorted(aside.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~UMASK)  # safetensors writes for the owner alone
        synced(path)
    synced(aside)
    old = _place_of_old(target)
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


def write_whole(target: Path, content: bytes, root: Path) -> None:
    """Writes a file below ``root`` that is there as a whole or, after a crash, as it was.

    Raises OSError, and UserError for a symbolic link on the way.
    """
    aside = target.with_name(f".{target.name}.part")
    with open_file(aside, root) as file:
        write_all(file, content)
        os.fsync(file.fileno())
    aside.replace(target)
    synced(target.parent)


@contextmanager
def agreed(group: Group | None) -> Iterator[None]:
    """What fails inside the block in one process fails in all: each comes to its end, and none goes
    on alone. Whatever the block does with other processes must fail in all of them alike. Raises
    UserError.
    """
    if group is None or group.size == 1:
        yield
        return
    failed: Exception | None = None
    try:
        yield
    except (OSError, UserError, SafetensorError) as error:
        failed = error
    said = gather_objects(
        group, failed.what if isinstance(failed, UserError) else str(failed) if failed else None
    )
    if isinstance(failed, UserError) and len(set(said)) == 1:
        raise failed  # as all others do
    if said := [f"rank {rank}: {what}" for rank, what in enumerate(said) if what is not None]:
        raise UserError(
            "; ".join(said), code="other-rank-failed", fix="see what that process' host lacks"
        ) from failed


def is_sharded(tensor: Tensor) -> bool:
    """Whether its parts lie in several processes."""
    return hasattr(tensor, "full_tensor")


class Snapshot:
    """Nested state as it is now: dicts, lists, tensors, numbers, strings and None, apart from what
    goes on changing.

    ``size``: bytes of its tensors without those in ``shards``, whose parts lie in several
    processes: these are used as they are when it is written. Raises UserError for anything else.
    """

    def __init__(self, state: Mapping[str, Any], *, copied: bool = True) -> None:
        """Without ``copied`` tensors that are on the host are used as they are: they must not
        change until it is written.
        """
        self._copied = copied
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, Tensor] = {}
        try:
            self.plain = json.dumps(self._described(state, ""))
        except TypeError as error:
            raise UserError(
                f"state that cannot be saved: {error}",
                code="state-not-savable",
                where="checkpoint",
                fix="use numbers, texts and tensors",
            ) from error
        self.size = sum(tensor.nbytes for tensor in self.tensors.values())

    def _described(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            # Numbered: keys may hold the mark between them. Shards apart: what else there is may
            # differ from process to process.
            sharded = is_sharded(value)
            name = f"shard {len(self.shards)}{path}" if sharded else f"{len(self.tensors)}{path}"
            if sharded:
                self.shards[name] = value.detach()
            else:
                self.tensors[name] = value.detach().to("cpu", copy=self._copied).contiguous()
            of = {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "sharded": sharded,
            }
            return {TENSOR: name, **of}
        if isinstance(value, Mapping):
            # Keys may be integers (optimizer states): kept as pairs.
            return {
                DICT: [[key, self._described(item, f"{path}/{key}")] for key, item in value.items()]
            }
        if isinstance(value, list | tuple):
            return [self._described(item, f"{path}/{i}") for i, item in enumerate(value)]
        return value

    def write(self, folder: Path) -> None:
        """Writes two files into a folder. Raises OSError or SafetensorError."""
        save_file(apart(self.tensors), folder / TENSORS)
        (folder / PLAIN).write_text(self.plain, encoding="utf-8")


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """No two of them in one piece of memory, which safetensors refuses."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen and tensor.nbytes else tensor
        seen.add(memory)
    return found


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that is left on the disk until there is one to fill."""

    folder: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    read: Read

    def into(self, tensor: Tensor) -> None:
        """Fills a tensor of this shape, sharded or not, of any type.

        Raises UserError when it has another shape.
        """
        fill([(self, tensor)])

    def whole(self) -> Tensor:
        """The tensor itself, on the host."""
        made = torch.empty(self.shape, dtype=self.dtype)
        self.into(made)
        return made


def load(folder: Path, read: Read | None = None, lazy: Collection[str] = ()) -> dict[str, Any]:
    """The state that ``Snapshot.write`` wrote. Raises UserError when the folder does not hold it.

    Sharded tensors are ``Stored``, and so are all under the keys in ``lazy``. read: what fills
    tensors from these.
    """
    read = read or _unread
    try:
        described = json.loads((folder / PLAIN).read_text(encoding="utf-8"))
        with safe_open(folder / TENSORS, "pt") as file:

            def rich(value: Any, later: bool) -> Any:
                if isinstance(value, list):
                    return [rich(item, later) for item in value]
                if not isinstance(value, dict):
                    return value
                if TENSOR not in value:
                    return {key: rich(item, later) for key, item in value[DICT]}
                if later or value.get("sharded"):
                    kind = getattr(torch, value["dtype"])
                    return Stored(folder, value[TENSOR], torch.Size(value["shape"]), kind, read)
                # A copy: a view of the file would hold it, and its room on the disk, for as long as
                # the run.
                return file.get_tensor(value[TENSOR]).clone()

            return {key: rich(item, key in lazy) for key, item in described[DICT]}
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"this is not a whole checkpoint ({error})",
            code="checkpoint-damaged",
            where=str(folder),
            fix="use another one",
        ) from error


def _unread(folder: Path, into: Mapping[str, Tensor]) -> None:
    raise TypeError(
        f"{folder} was loaded without a function that reads {next(iter(into), 'nothing')}"
    )


def fill(pairs: Iterable[tuple[Stored, Tensor]]) -> None:
    """Fills many tensors at once, each from one that is stored.

    Raises UserError when a shape is another.
    """
    wanted: dict[tuple[Path, Read], dict[str, Tensor]] = {}
    for stored, tensor in pairs:
        if (
            wanted.setdefault((stored.folder, stored.read), {}).setdefault(stored.name, tensor)
            is not tensor
        ):
            raise ValueError(f"{stored.name} cannot fill two tensors at once")
    for (folder, read), into in wanted.items():
        read(folder, into)


@torch.no_grad()
def put(saved: Mapping[str, Tensor | Stored], into: Mapping[str, Tensor]) -> None:
    """Fills each tensor with what is saved under its name.

    Raises UserError when a shape is another.
    """
    fill((value, own) for name, own in into.items() if isinstance(value := saved[name], Stored))
    for name, own in into.items():
        if isinstance(value := saved[name], Tensor):
            own.copy_(value)


def whole(state: Any) -> Any:
    """Nested state with all of its tensors in this process' memory."""
    if isinstance(state, Stored):
        return state.whole()
    if isinstance(state, Mapping):
        return {key: whole(item) for key, item in state.items()}
    return [whole(item) for item in state] if isinstance(state, list | tuple) else state


def for_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, ready for its ``load_state_dict``: what is stored lies like the
    parameter that it belongs to, sharded or not, on its device, where it has its shape, and on the
    host else.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs: list[tuple[Stored, Tensor]] = []

    def placed(value: Any, like: Tensor) -> Any:
        if not isinstance(value, Stored):
            return value
        same = value.shape == like.shape
        made = (
            torch.empty_like(like.detach(), dtype=value.dtype)
            if same
            else torch.empty(value.shape, dtype=value.dtype)
        )
        pairs.append((value, made))
        return made

    try:
        found = {
            i: {name: placed(value, parameters[int(i)]) for name, value in of.items()}
            for i, of in state["state"].items()
        }
    except IndexError:
        raise ValueError(
            f"it has {len(state['state'])} parameters instead of {len(parameters)}"
        ) from None
    fill(pairs)
    return {**state, "state": found}
