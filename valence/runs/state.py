"""Register, save and load everything in a run that has state."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from valence.errors import UserError

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
