"""Values: what return is expected from a token on, read off hidden states by a linear head."""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn

from valence.errors import UserError
from valence.models.policy_model import Critic, PolicyModel
from valence.models.scores import Scorer

PREFIX = "critic."
"""What the names of a critic's weights begin with among those of the policy."""


def add_values(policy: PolicyModel, *, trunk: Literal["separate", "shared"]) -> None:
    """Gives the policy a critic, so that it answers ``want=("value",)``; at first all values are 0.

    shared: the head reads the policy's own hidden states, and its gradient trains the policy as
    well. separate: it reads those of a copy of the policy, which trains with it; weights of the
    policy that do not train are shared, so that under an adapter the copy is one of the adapter
    alone. Its layers are not compiled. The critic's weights are among the policy's, as
    ``critic.*``, but not in ``policy.model``.

    Raises UserError for a reward model, for a policy that has a critic, and where weights or
    products are split over processes.
    """
    if isinstance(policy, Scorer):
        raise UserError(
            "a reward model cannot have a value head",
            code="value-head-unsupported",
            where="method",
            fix="train a language model",
        )
    if policy.critic is not None:
        raise UserError(
            "the policy already has a value head", code="value-head-exists", where="value"
        )
    if policy.is_sharded or policy.shared:
        raise UserError(
            "the value head does not support weights split over processes",
            code="value-head-unsupported",
            where="parallel",
            fix="set parallel.shard: off and parallel.tensor: 1, or choose a method without "
            "a value head, such as rloo",
        )
    policy.critic = Critic(policy, _trunk(policy) if trunk == "separate" else None).train(
        policy.training
    )


def _trunk(policy: PolicyModel) -> PolicyModel:
    """A copy of the policy's decoder, which shares all weights that do not train."""
    shared: dict[int, Any] = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    head: Any = policy.causal.get_output_embeddings()
    # nobody reads it: it would be a matrix that never gets a gradient
    shared[id(head)] = nn.Identity()
    made = PolicyModel(copy.deepcopy(policy.model, shared), compute=policy.compute)
    made.lay_out(packed=policy.packs)
    return made
