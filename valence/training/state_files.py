"""Nested state as files: tensors as safetensors, everything else as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError
from valence.storage import read_json

TENSOR, DICT = "__tensor__", "__dict__"
TENSORS, PLAIN = "tensors.safetensors", "state.json"
Write = Callable[[Path, Mapping[str, Tensor], Group | None], list[Path]]
"""Writes sharded tensors into a folder and returns the files of this process. All processes of the
group call it."""
Read = Callable[[Path, Mapping[str, Tensor]], None]
"""Fills tensors, sharded or not, with the tensors of the same names in a folder."""


@contextmanager
def agreed(group: Group | None) -> Iterator[None]:
    """Raise UserError in all processes if the block fails in one of them.

    Every process reaches the end of the block: collectives inside it must fail in all processes
    alike.
    """
    if group is None or group.size == 1:
        yield
        return
    failed: Exception | None = None
    try:
        yield
    except (OSError, UserError, SafetensorError) as error:
        failed = error
    problems = gather_objects(
        group, failed.message if isinstance(failed, UserError) else str(failed) if failed else None
    )
    if isinstance(failed, UserError) and len(set(problems)) == 1:
        raise failed  # as all others do
    if lines := [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]:
        raise UserError(
            "; ".join(lines),
            code="other-rank-failed",
            fix="fix the problem on the host of each rank that the message names",
        ) from failed


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is split over processes."""
    return hasattr(tensor, "full_tensor")


class Snapshot:
    """A copy of nested state: dicts, lists, tensors, numbers, strings and None.

    ``size``: bytes of its tensors without ``shards``, which are split over processes;
    ``sharded_size``: bytes of these in all processes. Raises UserError for values of other types.
    """

    def __init__(self, state: Mapping[str, Any], *, copied: bool = True) -> None:
        """copied: False uses shards and CPU tensors directly; they must not change until it is
        written.
        """
        self._copied = copied
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, Tensor] = {}
        try:
            self.plain = json.dumps(self._described(state, ""))
        except TypeError as error:
            raise UserError(
                f"the state cannot be saved: {error}",
                code="state-not-savable",
                where="checkpoint",
                fix="use only numbers, strings and tensors in the state",
            ) from error
        self.size = sum(tensor.nbytes for tensor in self.tensors.values())
        self.sharded_size = sum(
            shard.numel() * shard.element_size() for shard in self.shards.values()
        )

    def _described(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            # Numbered, because keys may contain the separator. Shards have their own numbers,
            # because the other tensors may differ between processes.
            sharded = is_sharded(value)
            name = f"shard {len(self.shards)}{path}" if sharded else f"{len(self.tensors)}{path}"
            if sharded:
                shard = value.detach()
                self.shards[name] = shard.to("cpu", copy=True) if self._copied else shard
            else:
                self.tensors[name] = value.detach().to("cpu", copy=self._copied).contiguous()
            return {
                TENSOR: name,
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "sharded": sharded,
            }
        if isinstance(value, Mapping):
            # Keys may be integers (optimizer states): kept as pairs.
            return {
                DICT: [[key, self._described(item, f"{path}/{key}")] for key, item in value.items()]
            }
        if isinstance(value, list | tuple):
            return [self._described(item, f"{path}/{i}") for i, item in enumerate(value)]
        return value

    def write(self, folder: Path) -> None:
        """Write two files into a folder. Raises OSError or SafetensorError."""
        save_file(without_shared_memory(self.tensors), folder / TENSORS)
        (folder / PLAIN).write_text(self.plain, encoding="utf-8")


def without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, cloned where two share memory, which safetensors refuses."""
    addresses: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in addresses and tensor.nbytes else tensor
        addresses.add(address)
    return result


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that stays on disk until it is needed."""

    folder: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    read: Read

    def into(self, tensor: Tensor) -> None:
        """Fill a tensor of this shape, sharded or not, of any dtype.

        Raises UserError if the shapes differ.
        """
        fill([(self, tensor)])

    def load(self) -> Tensor:
        """Read the full tensor into CPU memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.into(tensor)
        return tensor


def load(folder: Path, read: Read | None = None, lazy: Collection[str] = ()) -> dict[str, Any]:
    """Load the state that ``Snapshot.write`` wrote. Raises UserError if it is damaged.

    Sharded tensors, and all under the keys in ``lazy``, are returned as ``Stored``. read: fills
    tensors from these.
    """
    read = read or _no_reader
    try:
        described = read_json(folder / PLAIN)
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
                # Copied: a view would keep the file, and its disk space, as long as the run.
                return file.get_tensor(value[TENSOR]).clone()

            return {key: rich(item, key in lazy) for key, item in described[DICT]}
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"this checkpoint is damaged ({error})",
            code="checkpoint-damaged",
            where=str(folder),
            fix="choose another checkpoint with --step, or move this folder away to resume from "
            "an earlier one",
        ) from error


def _no_reader(folder: Path, into: Mapping[str, Tensor]) -> None:
    raise TypeError(
        f"{folder} was loaded without a function that reads {next(iter(into), 'nothing')}"
    )


def fill(pairs: Iterable[tuple[Stored, Tensor]]) -> None:
    """Fill many tensors at once from stored ones. Raises UserError if shapes differ."""
    targets: dict[tuple[Path, Read], dict[str, Tensor]] = {}
    for stored, tensor in pairs:
        if (
            targets.setdefault((stored.folder, stored.read), {}).setdefault(stored.name, tensor)
            is not tensor
        ):
            raise ValueError(f"{stored.name} cannot fill two tensors at once")
    for (folder, read), into in targets.items():
        read(folder, into)


@torch.no_grad()
def put(saved: Mapping[str, Tensor | Stored], into: Mapping[str, Tensor]) -> None:
    """Fill each tensor with the saved one of its name. Raises UserError if shapes differ."""
    fill(
        (value, tensor) for name, tensor in into.items() if isinstance(value := saved[name], Stored)
    )
    for name, tensor in into.items():
        if isinstance(value := saved[name], Tensor):
            tensor.copy_(value)


def load_tensors(state: Any) -> Any:
    """Nested state with all stored tensors loaded into memory."""
    if isinstance(state, Stored):
        return state.load()
    if isinstance(state, Mapping):
        return {key: load_tensors(item) for key, item in state.items()}
    return [load_tensors(item) for item in state] if isinstance(state, list | tuple) else state


def for_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the state of an optimizer for its ``load_state_dict``.

    A stored tensor with the shape of its parameter is placed and sharded like it; others stay on
    the CPU.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs: list[tuple[Stored, Tensor]] = []

    def placed(value: Any, like: Tensor) -> Any:
        if not isinstance(value, Stored):
            return value
        tensor = (
            torch.empty_like(like.detach(), dtype=value.dtype)
            if value.shape == like.shape
            else torch.empty(value.shape, dtype=value.dtype)
        )
        pairs.append((value, tensor))
        return tensor

    try:
        loaded = {
            i: {name: placed(value, parameters[int(i)]) for name, value in of.items()}
            for i, of in state["state"].items()
        }
    except IndexError:
        raise ValueError(
            f"the saved optimizer state has {len(state['state'])} parameters, but the optimizer "
            f"has {len(parameters)}"
        ) from None
    fill(pairs)
    return {**state, "state": loaded}


State = dict[str, Any]
"""Nested dicts and lists of tensors, numbers, strings and None."""


class Stateful(Protocol):
    """An object with state to save."""

    @property
    def state_dict(self) -> Callable[[], Any]: ...
    @property
    def load_state_dict(self) -> Callable[[Any], Any]: ...


class Registry:
    """The parts of a run that have state, by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}

    def add(self, name: str, part: Stateful) -> None:
        if name in self.parts:
            raise ValueError(f"{name} is already registered")
        self.parts[name] = part

    def state_dict(self, leaving_out: Collection[str] = ()) -> State:
        return {
            name: part.state_dict() for name, part in self.parts.items() if name not in leaving_out
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of all parts.

        Raises UserError, before anything is changed, if the state has other parts.
        """
        differing = sorted(self.parts.keys() ^ state.keys())
        if differing:
            raise UserError(
                f"the checkpoint was saved by another version of Valence (first difference: "
                f"{differing[0]})",
                code="checkpoint-version",
                where="checkpoint",
                fix="resume with the version of Valence that saved it, or start over with --fresh",
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class StateFunctions:
    """State that two functions save and load."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.state_dict, self.load_state_dict = get, put


class RandomState:
    """The global random generators of torch, numpy and Python, as they are when this is created."""

    def __init__(self) -> None:
        self._torch = {"torch": torch.get_rng_state()}
        self._torch |= {name: rng.get_rng_state() for name, rng in _accelerators().items()}
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=True)

    def restore(self) -> None:
        torch.set_rng_state(self._torch["torch"])
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for name, rng in _accelerators().items():
            if name in self._torch:
                rng.set_rng_state(self._torch[name])

    def state_dict(self) -> State:
        version, words, gauss = self._python
        name, keys, at, has_gauss, cached = self._numpy
        return {
            **self._torch,
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64),
                "gauss": gauss,
            },
            "numpy": {
                "name": name,
                "keys": torch.tensor(np.asarray(keys, np.int64)),
                "at": at,
                "gauss": [has_gauss, cached],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        python, numpy = state["python"], state["numpy"]
        self._torch = {name: state[name] for name in ("torch", "cuda", "mps") if name in state}
        self._python = python["version"], tuple(python["words"].tolist()), python["gauss"]
        keys = numpy["keys"].numpy().astype(np.uint32)
        self._numpy = (numpy["name"], keys, numpy["at"], *numpy["gauss"])
        self.restore()


def _accelerators() -> dict[str, Any]:
    return {
        name: getattr(torch, name)
        for name in ("cuda", "mps")
        if getattr(torch, name).is_available()
    }
