"""Log-probabilities under the reference, by the cheapest exact method: the policy with its adapter
disabled, or a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from valence.errors import UserError
from valence.models.digest import Digests, digests
from valence.models.divergence import Distributions, TopTokens
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch


class Reference(Protocol):
    """Computes ``logp[T]`` of a micro-batch without a gradient."""

    name: str
    precision: torch.dtype
    """Dtype of the products."""

    def digests(self) -> Digests:
        """Return the digests of the model and of its weights."""
        ...

    def __call__(self, batch: MicroBatch) -> Tensor: ...

    def distributions(
        self, batch: MicroBatch, rows: Tensor, top_k: int | None
    ) -> Distributions | TopTokens:
        """Return the distributions of the tokens in these rows (``PolicyModel.distributions``), or
        the ``top_k`` most likely tokens.
        """
        ...


class AdapterDisabledReference:
    """The policy with its adapter disabled: exact if the adapter was zero at the start."""

    name = "the policy with its adapter disabled"

    def __init__(self, policy: PolicyModel) -> None:
        self.policy, self.precision = policy, _precision(policy)

    def digests(self) -> Digests:
        return digests(self.policy, adapter=False)

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        with _without_adapter(self.policy.model):
            return self.policy(batch).logp

    def distributions(self, batch: MicroBatch, rows: Tensor, top_k: int | None) -> Distributions:
        with _without_adapter(self.policy.model):
            distributions = self.policy.distributions(batch, rows)
        # The head is read outside of this block, where its adapter is enabled again.
        head = distributions.head
        layer: Any = getattr(head.layer, "base_layer", head.layer)
        return distributions._replace(head=replace(head, layer=layer))


@contextmanager
def _without_adapter(model: nn.Module) -> Iterator[None]:
    """PEFT's ``disable_adapter`` without its report on all layers, which took a tenth of the time
    in a profile of a tiny run.
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
    """A separate model that is never updated."""

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

    def distributions(self, batch: MicroBatch, rows: Tensor, top_k: int | None) -> Distributions:
        return self.engine.distributions(batch, rows)


class SyncedReference(FrozenReference):
    """A copy of the policy that is moved towards it from time to time, and shares its frozen
    weights.
    """

    def __init__(self, policy: PolicyModel) -> None:
        engine = copy_policy(policy, frozen_weights(policy))
        self.trained = [name for name, p in engine.named_parameters() if p.requires_grad]
        super().__init__(engine, "a copy that is updated from the policy")

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that are moved, by name."""
        parameters = dict(self.engine.named_parameters())
        return {name: parameters[name] for name in self.trained}

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Replace the weights w by (1 - mix) w + mix * weights, by the policy's names (Gorbatovski
        et al. 2024, arXiv 2404.09656).
        """
        for name, weight in self.weights.items():
            new = weights[name]
            weight.copy_(new if mix == 1 else torch.lerp(weight, new.to(weight), mix))


def tempered(reference: Reference | None, temperature: float) -> AbstractContextManager[None]:
    """Inside the block, a reference with a separate model has this temperature. One that runs the
    policy has that of the policy.
    """
    is_separate = isinstance(reference, FrozenReference)
    return reference.engine.tempered(temperature) if is_separate else nullcontext()


class LazyReference:
    """A reference that was released, and is loaded again on first use."""

    def __init__(
        self, reference: Reference, expected: Digests, load: Callable[[], Reference]
    ) -> None:
        self.name, self.precision = reference.name, reference.precision
        self._digests, self._load = expected, load
        self._loaded: Reference | None = None

    def digests(self) -> Digests:
        return self._digests

    def __call__(self, batch: MicroBatch) -> Tensor:
        return self._model()(batch)

    def distributions(
        self, batch: MicroBatch, rows: Tensor, top_k: int | None
    ) -> Distributions | TopTokens:
        return self._model().distributions(batch, rows, top_k)

    def _model(self) -> Reference:
        """Raises UserError when the loaded model differs from the released one."""
        if self._loaded is None:
            loaded = self._load()
            if loaded.digests() != self._digests:
                raise UserError(
                    "the reference model has changed since the run began",
                    code="reference-changed",
                    where=self.name,
                    fix="restore the model, or start the run over with --fresh",
                )
            self._loaded = loaded
        return self._loaded


def frozen_weights(policy: PolicyModel) -> dict[int, Any]:
    """Return the frozen weights by their ids: a copy of the policy may share them."""
    return {id(p): p for p in policy.parameters() if not p.requires_grad}


def copy_policy(policy: PolicyModel, shared: dict[int, Any]) -> PolicyModel:
    """Return a copy of the policy without a critic. shared: weights of both, by their ids."""
    critic, policy.critic = policy.critic, None
    try:
        return copy.deepcopy(policy, shared)
    finally:
        policy.critic = critic


def _precision(engine: PolicyModel) -> torch.dtype:
    return engine.compute or next(engine.model.parameters()).dtype
