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
                f"this state was saved by another version of Valence (first difference: "
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
    """The global random generators of torch, numpy and Python."""

    def state_dict(self) -> State:
        version, words, gauss = random.getstate()
        name, keys, at, has_gauss, cached = np.random.get_state(legacy=True)
        state: State = {
            "torch": torch.get_rng_state(),
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
        return state | {name: rng.get_rng_state() for name, rng in _accelerators().items()}

    def load_state_dict(self, state: Any) -> None:
        torch.set_rng_state(state["torch"])
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(
            (numpy["name"], numpy["keys"].numpy().astype(np.uint32), numpy["at"], *numpy["gauss"])
        )
        for name, rng in _accelerators().items():
            if name in state:
                rng.set_rng_state(state[name])


def _accelerators() -> dict[str, Any]:
    return {
        name: getattr(torch, name)
        for name in ("cuda", "mps")
        if getattr(torch, name).is_available()
    }
