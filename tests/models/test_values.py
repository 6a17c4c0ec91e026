"""A critic against the oracle: hidden states of the model's own forward, one sequence at a time, in
float64.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.errors import raises_error
from tests.models.test_oracle import PATTERNS, policy, prefix_tree_batch
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.models.adapters import has_adapter
from valence.models.build import build_policy, build_reference, load_model
from valence.models.digest import model_digest
from valence.models.policy_model import PolicyModel
from valence.models.reference import SyncedReference
from valence.models.scores import Scorer
from valence.models.values import PREFIX, add_values
from valence.types import MicroBatch

TRUNKS: tuple[Literal["separate", "shared"], ...] = ("separate", "shared")
LORA = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})


def valued(
    trunk: Literal["separate", "shared"], name: str = "llama", mode: str = "full"
) -> PolicyModel:
    """A policy with a critic that says something, and whose trunk has moved away from the
    policy's.
    """
    engine = policy(name, mode)
    add_values(engine, trunk=trunk)
    assert engine.critic is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in engine.critic.parameters():
            if weight.requires_grad:
                weight.add_(
                    torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.1
                )
    return engine


def by_hand(engine: PolicyModel, batch: MicroBatch) -> Tensor:
    """V [T] of the token before each that is read, from the last hidden states of a stock
    forward.
    """
    assert engine.critic is not None
    reads = engine.critic.trunk or engine
    head = engine.critic.head
    result = torch.zeros(len(batch.tokens), dtype=torch.float64)
    decoder = getattr(reads.causal, reads.causal.base_model_prefix)
    with reads.stock():
        for s in range(batch.sequences):
            rows = batch.rows(s)
            read = torch.nonzero(batch.loss_mask[rows] & (batch.sequence_ids[rows] == s)).squeeze(1)
            hidden = decoder(
                input_ids=batch.tokens[rows][None], output_hidden_states=True
            ).hidden_states[-1][0]
            result = result.index_put(
                (rows[read],), hidden[read - 1] @ head.weight[0] + head.bias[0]
            )
    return result


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", "lora"),
        *(
            pytest.param(*item, marks=pytest.mark.slow)
            for item in (
                ("llama", "full"),
                ("gemma2", "full"),
                ("llama-tied", "checkpointed"),
                ("gpt2", "lora"),
                ("qwen3", "full"),
            )
        ),
    ],
)
def test_values_and_gradients_are_those_of_one_sequence_at_a_time(
    name: str, mode: str, packed: bool, trunk: Literal["separate", "shared"]
) -> None:
    """Together with the log-probabilities, which are those without a critic; only what trains has a
    gradient.
    """
    engine = valued(trunk, name, mode)
    engine.lay_out(packed=packed)
    batch = prefix_tree_batch(conversations(), PATTERNS[1])
    trains = torch.tensor(batch.requires_grad)[batch.sequence_ids] & batch.loss_mask
    wanted = by_hand(engine, batch)
    slopes = torch.randn(
        len(batch.tokens), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    weights = {key: p for key, p in engine.named_parameters() if p.requires_grad}
    full = (
        engine.critic.trunk
        if engine.critic is not None and engine.critic.trunk is not None
        else engine
    )
    with full.stock():
        theirs = torch.autograd.grad(
            (wanted * slopes)[trains].sum(), list(weights.values()), allow_unused=True
        )
    rough = name == "gemma2"
    for extra in (0, 10_000):
        full.max_joint_rows = extra
        out = engine(batch, ("value",))
        assert out.value is not None
        assert torch.equal(out.logp, engine(batch).logp)
        assert (out.value[~batch.loss_mask] == 0).all()
        torch.testing.assert_close(
            out.value, wanted, rtol=1e-5 if rough else 1e-11, atol=1e-5 if rough else 1e-11
        )
        ours = torch.autograd.grad(
            (out.value * slopes).sum(), list(weights.values()), allow_unused=True
        )
        for key, one, other in zip(weights, ours, theirs, strict=True):
            assert (one is None) == (other is None), key
            if one is not None:
                torch.testing.assert_close(
                    one, other, rtol=1e-3 if rough else 1e-6, atol=1e-4 if rough else 1e-6, msg=key
                )


@pytest.mark.parametrize("mode", ["full", "lora", "checkpointed"])
def test_a_critic_with_a_separate_trunk_and_the_policy_are_independent(mode: str) -> None:
    engine, batch = valued("separate", mode=mode), prefix_tree_batch(conversations())
    out = engine(batch, ("value",))
    assert out.value is not None
    trained = {key: p for key, p in engine.named_parameters() if p.requires_grad}
    for message, actual in ((out.value, True), (out.logp, False)):
        slopes = torch.autograd.grad(
            message.sum(), list(trained.values()), retain_graph=True, allow_unused=True
        )
        for key, slope in zip(trained, slopes, strict=True):
            assert (slope is not None and bool((slope != 0).any())) == (
                key.startswith(PREFIX) is actual
            ), key


def test_with_the_trunk_of_the_policy_its_gradient_trains_the_policy() -> None:
    engine, batch = valued("shared"), prefix_tree_batch(conversations())
    out = engine(batch, ("value",))
    assert out.value is not None
    slopes = torch.autograd.grad(
        out.value.sum(), list(engine.model.parameters()), allow_unused=True
    )
    unread = [
        key
        for (key, _), slope in zip(engine.model.named_parameters(), slopes, strict=True)
        if slope is None
    ]
    assert unread == ["lm_head.weight"]


def test_under_an_adapter_a_trunk_shares_all_weights_that_do_not_train() -> None:
    engine = policy("llama", "lora")
    before = {key: p.requires_grad for key, p in engine.named_parameters()}
    add_values(engine, trunk="separate")
    after = {key: p.requires_grad for key, p in engine.named_parameters()}
    assert engine.critic is not None
    assert engine.critic.trunk is not None
    actual = {key.replace("critic.trunk.", "") for key in after if key.startswith("critic.trunk.")}
    assert actual == {key for key, trains in before.items() if trains}
    assert after == before | {f"critic.trunk.{key}": True for key in actual} | {
        "critic.head.weight": True,
        "critic.head.bias": True,
    }
    theirs = dict(engine.critic.trunk.model.named_parameters())
    frozen = {
        key: p
        for key, p in engine.model.named_parameters()
        if not p.requires_grad and "lm_head" not in key
    }
    assert len(frozen) == 20
    assert all(theirs[key] is p for key, p in frozen.items())


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_critic_begins_at_zero_and_leaves_all_else_as_it_was(
    trunk: Literal["separate", "shared"], mode: str
) -> None:
    """What is saved and sampled, what log-probabilities are, and the generator of random
    numbers.
    """
    engine, batch = policy("llama", mode), prefix_tree_batch(conversations())
    saved, logp, random = dict(engine.model.state_dict()), engine(batch).logp, torch.get_rng_state()
    digest = model_digest(engine, adapter=True)
    add_values(engine, trunk=trunk)
    assert torch.equal(torch.get_rng_state(), random)
    after = engine.model.state_dict()
    assert saved.keys() == after.keys()
    assert all(saved[key].data_ptr() == after[key].data_ptr() for key in saved)
    out = engine(batch, ("value",))
    assert out.value is not None
    assert out.value.requires_grad
    assert not out.value.any()
    assert torch.equal(out.logp, logp)
    assert engine(batch).value is None
    assert model_digest(engine, adapter=True) == digest
    assert all(module.training for module in engine.modules())


def test_a_separate_trunk_starts_as_a_copy_of_the_policy() -> None:
    """With the same head, both say the same."""
    results: list[Tensor] = []
    for trunk in TRUNKS:
        engine = policy("llama", "lora")
        add_values(engine, trunk=trunk)
        assert engine.critic is not None
        torch.nn.init.normal_(engine.critic.head.weight, generator=torch.Generator().manual_seed(0))
        out = engine(prefix_tree_batch(conversations()), ("value",))
        assert out.value is not None
        results.append(out.value)
    assert torch.equal(results[0], results[1])
    assert results[0].std() > 0.1


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_trained_weights_suffice_for_a_saved_state(
    trunk: Literal["separate", "shared"], mode: str
) -> None:
    engine, batch = valued(trunk, mode=mode), prefix_tree_batch(conversations())
    saved = {key: p.detach().clone() for key, p in engine.named_parameters() if p.requires_grad}
    other = policy("llama", mode)
    add_values(other, trunk=trunk)
    actual = {key: p for key, p in other.named_parameters() if p.requires_grad}
    assert actual.keys() == saved.keys()
    with torch.no_grad():
        for key, p in actual.items():
            p.copy_(saved[key])
    one, two = engine(batch, ("value",)).value, other(batch, ("value",)).value
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("mode", "packed"),
    [
        ("lora", True),
        ("full", False),
        *(
            pytest.param(*item, marks=pytest.mark.slow)
            for item in (("full", True), ("lora", False))
        ),
    ],
)
def test_values_over_bfloat16_are_float32(mode: str, packed: bool) -> None:
    lora = LORA if mode == "lora" else None
    engine = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16, lora=lora)
    assert has_adapter(engine.model) is (mode == "lora")
    add_values(engine, trunk="separate")
    assert engine.critic is not None
    torch.nn.init.normal_(engine.critic.head.weight, generator=torch.Generator().manual_seed(0))
    engine.lay_out(packed=packed)
    result = engine(prefix_tree_batch(conversations()), ("value",)).value
    assert result is not None
    assert result.dtype == engine.critic.head.weight.dtype == torch.float32
    assert not torch.equal(result, result.bfloat16().float())
    exact = copy.deepcopy(engine)
    exact.float()
    for part in (exact, exact.critic.trunk if exact.critic else None):
        assert part is not None
        part.compute = None
    wanted = exact(prefix_tree_batch(conversations()), ("value",)).value
    assert wanted is not None
    assert 0 < (result - wanted).abs().max() < 0.3


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_reference_has_no_critic_and_follows_the_policy_all_the_same(
    trunk: Literal["separate", "shared"],
) -> None:
    engine, batch = valued(trunk, mode="lora"), prefix_tree_batch(conversations())
    critic = engine.critic
    frozen = build_reference(engine, fresh_adapter=False)
    following = build_reference(engine, fresh_adapter=False, follows=True)
    assert engine.critic is critic is not None
    assert isinstance(following, SyncedReference)
    before = engine(batch).logp.detach()
    with torch.no_grad():
        for p in engine.parameters():
            if p.requires_grad:
                p.add_(0.05)
    for result in (frozen, following):
        assert result.engine.critic is None  # type: ignore[attr-defined]
        assert torch.equal(result(batch), before)
    following.follow({key: p.detach() for key, p in engine.named_parameters() if p.requires_grad})
    assert torch.equal(following(batch), engine(batch).logp.detach())


def test_a_model_without_values_is_an_error(tmp_path: Any) -> None:
    engine = policy("llama")
    with pytest.raises(ValueError, match="add_values"):
        engine(prefix_tree_batch(conversations()), ("value",))
    engine.is_sharded = True
    with raises_error("value-head-unsupported", where="parallel", fix="parallel.shard: off"):
        add_values(engine, trunk="shared")
    engine.is_sharded, engine.is_tensor_parallel = False, True
    with raises_error("value-head-unsupported", where="parallel", fix="parallel.tensor: 1"):
        add_values(engine, trunk="separate")
    engine.is_tensor_parallel = False
    add_values(engine, trunk="shared")
    with raises_error("value-head-exists", where="value"):
        add_values(engine, trunk="shared")
    tiny().save_pretrained(tmp_path)  # type: ignore[operator]
    scorer = Scorer(load_model(str(tmp_path), dtype=torch.float64, attributes=["score"]))
    with raises_error("value-head-unsupported", where="method"):
        add_values(scorer, trunk="shared")
