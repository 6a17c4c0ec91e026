"""Log-probabilities at another temperature than 1: those of softmax(logits / temperature), in every
layout, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_oracle import PATTERNS, named, policy, prefix_tree_batch
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.models.build import build_reference
from valence.models.digest import model_digest
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch

HEAT = 0.6


def by_hand(engine: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and sum of squares [T] from the logits of the model's own forward, each
    sequence by itself.
    """
    result = torch.zeros(3, len(batch.tokens), dtype=torch.float64)
    with engine.stock():
        for s in range(batch.sequences):
            rows = batch.rows(s)
            read = torch.nonzero(batch.loss_mask[rows] & (batch.sequence_ids[rows] == s)).squeeze(1)
            logits = engine.model(input_ids=batch.tokens[rows][None], use_cache=False).logits[
                0, read - 1
            ]
            p = torch.softmax(logits / HEAT, -1)
            message = (
                p.gather(1, batch.tokens[rows][read, None])[:, 0].log(),
                -(p * p.log()).sum(-1),
                p.square().sum(-1),
            )
            result = result.index_put(
                (torch.arange(3)[:, None], rows[read][None]), torch.stack(message)
            )
    logp, entropy, squares = result
    return logp, entropy, squares


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "name", named(["llama", "llama-tied", "gemma2", "cohere", "gpt2"], ["llama", "gemma2"])
)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_values_and_gradients_are_those_of_tempered_logits(
    name: str, mode: str, packed: bool
) -> None:
    engine = policy(name, mode)
    engine.max_columns = 5
    plain = engine(prefix_tree_batch(conversations())).logp.detach()
    engine.temperature = HEAT
    engine.lay_out(packed=packed)
    batch = prefix_tree_batch(conversations(), PATTERNS[1])
    logp, entropy, squares = by_hand(engine, batch)
    rough = name == "gemma2"  # a softmax in float32 in the model's own attention
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if rough else {"rtol": 1e-11, "atol": 1e-11}
    alone = engine(batch)
    assert alone.entropy is alone.sum_sq is None
    out = engine(batch, ("entropy", "sum_sq"))
    assert out.entropy is not None
    assert out.sum_sq is not None
    for one, other in (
        (out.logp, logp),
        (out.entropy, entropy),
        (out.sum_sq, squares),
        (alone.logp, logp),
    ):
        torch.testing.assert_close(one, other, **near)
    assert (out.logp - plain).abs().max() > 0.01
    trains = torch.tensor(batch.requires_grad)[batch.sequence_ids] & batch.loss_mask
    slopes = torch.randn(
        2, len(batch.tokens), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    weights = [p for p in engine.parameters() if p.requires_grad]
    with engine.stock():
        wanted = torch.autograd.grad(
            (logp * slopes[0] + entropy * slopes[1])[trains].sum(), weights
        )
    result = torch.autograd.grad((out.logp * slopes[0] + out.entropy * slopes[1]).sum(), weights)
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-3 if rough else 1e-6, atol=1e-4 if rough else 1e-6
        )


def test_references_are_computed_at_the_same_temperature_and_known_by_it() -> None:
    """A frozen copy, a synced copy, the policy without its adapter, and a separate model with the
    same weights.
    """
    batch = prefix_tree_batch(conversations())
    for mode in ("full", "lora"):
        engine = policy("llama", mode)
        cold = build_reference(engine, fresh_adapter=False).digests().model
        engine.temperature = HEAT
        assert engine.computation.endswith("temperature 0.6")
        logp = engine(batch).logp.detach()
        for follows in (False, True):
            copied = build_reference(engine, fresh_adapter=False, follows=follows)
            assert torch.equal(copied(batch), logp)
            assert copied.digests().model == model_digest(engine, adapter=True) != cold
    off = build_reference(engine, fresh_adapter=True)
    actual = build_reference(engine, fresh_adapter=True, model=tiny())
    assert torch.equal(off(batch), actual(batch))
    assert not torch.equal(off(batch), logp)
