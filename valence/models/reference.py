"""Log-probabilities under the reference, by the cheapest way that is exact: the adapter switched
off, or a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from valence.errors import UserError
from valence.models.digest import Digests, digests
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch


class Reference(Protocol):
    """Something that gives ``logp[T]`` of a micro-batch without a gradient."""

    name: str
    precision: torch.dtype
    """Of the products."""

    def digests(self) -> Digests:
        """Names the model that the values come from, and its weights alone."""
        ...

    def __call__(self, batch: MicroBatch) -> Tensor: ...


class AdapterDisabledReference:
    """The policy's own weights with the adapter switched off.

    Exact when the adapter started from zero.
    """

    name = "the policy with its adapter switched off"

    def __init__(self, policy: PolicyModel) -> None:
        self.policy, self.precision = policy, _precision(policy)

    def digests(self) -> Digests:
        return digests(self.policy, adapter=False)

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        with _without_adapter(self.policy.model):
            return self.policy(batch).logp


@contextmanager
def _without_adapter(model: nn.Module) -> Iterator[None]:
    """As peft's ``disable_adapter``, which first walks through all layers several times for a
    report on them: in a profile of a tiny run a tenth of its time.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class FrozenReference:
    """A model of its own that is never updated."""

    def __init__(
        self, engine: PolicyModel, name: str = "a frozen copy of the starting policy"
    ) -> None:
        self.engine, self.name = engine.requires_grad_(False).eval(), name
        self.precision = _precision(engine)

    def digests(self) -> Digests:
        return digests(self.engine, adapter=True)

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        return self.engine(batch).logp


class SyncedReference(FrozenReference):
    """A copy of the policy that moves towards it from time to time.

    Both share the weights that the policy does not train.
    """

    def __init__(self, policy: PolicyModel) -> None:
        engine = copied(policy, frozen_weights(policy))
        self.trained = [name for name, p in engine.named_parameters() if p.requires_grad]
        super().__init__(engine, "a copy that is updated from the policy")

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those that move, by name."""
        own = dict(self.engine.named_parameters())
        return {name: own[name] for name in self.trained}

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Moves this share of the way to weights that have the policy's names (Gorbatovski et al.
        2024, arXiv 2404.09656).
        """
        for name, own in self.weights.items():
            own.copy_(weights[name] if mix == 1 else torch.lerp(own, weights[name].to(own), mix))


class LazyReference:
    """A reference that was let go of, and is loaded again when it is first asked for."""

    def __init__(self, reference: Reference, known: Digests, load: Callable[[], Reference]) -> None:
        self.name, self.precision = reference.name, reference.precision
        self._digests, self._load = known, load
        self._loaded: Reference | None = None

    def digests(self) -> Digests:
        return self._digests

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Raises UserError when what is loaded is another model by now."""
        if self._loaded is None:
            found = self._load()
            if found.digests() != self._digests:
                raise UserError(
                    "the reference has changed since the run began",
                    code="reference-changed",
                    where=self.name,
                    fix="start the run over with --fresh",
                )
            self._loaded = found
        return self._loaded(batch)


def frozen_weights(policy: PolicyModel) -> dict[int, Any]:
    """The weights that do not train, by their ids: a copy of the policy may share them."""
    return {id(p): p for p in policy.parameters() if not p.requires_grad}


def copied(policy: PolicyModel, shared: dict[int, Any]) -> PolicyModel:
    """A copy of the policy without a critic. shared: by their ids, what both are to have."""
    critic, policy.critic = policy.critic, None
    try:
        return copy.deepcopy(policy, shared)
    finally:
        policy.critic = critic


def _precision(engine: PolicyModel) -> torch.dtype:
    return engine.compute or next(engine.model.parameters()).dtype
