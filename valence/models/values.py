"""Values: the expected return from a token on, computed from hidden states by a linear head."""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn

from valence.errors import UserError
from valence.models.policy_model import Critic, PolicyModel
from valence.models.scores import Scorer

PREFIX = "critic."
"""Prefix of the names of a critic's weights among those of the policy."""


def add_values(policy: PolicyModel, *, trunk: Literal["separate", "shared"]) -> None:
    """Add a critic to the policy, which then computes ``want=("value",)``. All values are
    initially 0.

    trunk: with "shared" the head reads the policy's hidden states, and its gradient trains the
    policy as well. With "separate" it reads those of a copy of the policy, which is trained with
    it and not compiled. The copy shares the policy's frozen weights: under an adapter, only the
    adapter is copied. The critic's weights are named ``critic.*``, and are not in ``policy.model``.

    Raises UserError for a reward model, for a policy that has a critic, and when weights or
    products are split over processes.
    """
    if isinstance(policy, Scorer):
        raise UserError(
            "a reward model cannot have a value head",
            code="value-head-unsupported",
            where="method",
            fix="use a method that trains a language model",
        )
    if policy.critic is not None:
        raise UserError("the policy already has a critic", code="value-head-exists", where="value")
    if policy.is_sharded or policy.shares_rows:
        raise UserError(
            "a value head does not support weights, matrix products or tokens that processes share",
            code="value-head-unsupported",
            where="parallel",
            fix="set parallel.shard: off, parallel.tensor: 1 and parallel.context: 1, or use a "
            "method without a value head, such as rloo",
        )
    policy.critic = Critic(policy, _trunk(policy) if trunk == "separate" else None).train(
        policy.training
    )


def _trunk(policy: PolicyModel) -> PolicyModel:
    """Return a copy of the policy's decoder that shares all frozen weights."""
    shared: dict[int, Any] = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    head: Any = policy.causal.get_output_embeddings()
    # The copy needs no head, which would be a matrix without a gradient.
    shared[id(head)] = nn.Identity()
    trunk = PolicyModel(copy.deepcopy(policy.model, shared), compute=policy.compute)
    trunk.lay_out(packed=policy.packs, attention=policy.attention_backend)
    return trunk
