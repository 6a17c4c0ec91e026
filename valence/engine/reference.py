"""Log-probabilities under the reference, by the cheapest way that is exact: the adapter switched off, or a frozen copy."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from valence.engine.digest import model_digest
from valence.engine.logprobs import Engine
from valence.types import Batch


class Reference(Protocol):
    """Something that gives ``logp[T]`` of a micro-batch without a gradient."""

    name: str

    def digest(self) -> str:
        """Names the model that the values come from."""
        ...

    def __call__(self, batch: Batch) -> Tensor: ...


class AdapterOff:
    """The policy's own weights with the adapter switched off. Exact when the adapter started from zero."""

    name = "the policy with its adapter switched off"

    def __init__(self, policy: Engine) -> None:
        self.policy = policy

    def digest(self) -> str:
        return model_digest(self.policy, adapter=False)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        with self.policy.model.disable_adapter():  # type: ignore[operator]
            return self.policy(batch).logp


class Frozen:
    """A model of its own that is never updated."""

    def __init__(self, engine: Engine, name: str = "a frozen copy of the starting policy") -> None:
        self.engine, self.name = engine.requires_grad_(False).eval(), name

    def digest(self) -> str:
        return model_digest(self.engine, adapter=True)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        return self.engine(batch).logp
