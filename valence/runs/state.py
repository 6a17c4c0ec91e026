"""Everything of a run that has state is registered here, and is saved and loaded as one."""

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
    """Something whose later behaviour depends on more than what it was made from."""

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
            raise ValueError(f"{name} is registered already")
        self.parts[name] = part

    def state_dict(self, leaving_out: Collection[str] = ()) -> State:
        return {
            name: part.state_dict() for name, part in self.parts.items() if name not in leaving_out
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError when the state is not of these parts, of which then none has changed."""
        odd = sorted(self.parts.keys() ^ state.keys())
        if odd:
            what = f"the saved state is that of another version (first difference: {odd[0]})"
            raise UserError(
                what,
                code="checkpoint-version",
                where="checkpoint",
                fix="resume with the version that saved it, or start over with --fresh",
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Through:
    """State that is read and put back by two functions."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.state_dict, self.load_state_dict = get, put


class RandomState:
    """The generators that anything in the process may draw from: those of torch, numpy and
    Python.
    """

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
