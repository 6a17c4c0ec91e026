"""The engine against the oracle: one sequence at a time, unpadded, through the model's own forward, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models import ARCHITECTURES, tiny
from valence.engine import attention, head
from valence.engine.check import plain_batch
from valence.engine.logprobs import Engine
from valence.engine.models import build_policy, build_reference

LENGTHS = (11, 2, 7, 16)


def sequences(vocabulary: int = 97) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=made) for n in LENGTHS]


def oracle(model: nn.Module, tokens: Tensor) -> Tensor:
    """log p of every token but the first, from nothing but the model's logits: [n-1]."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double()
    return (logits - torch.logsumexp(logits, -1, keepdim=True))[torch.arange(len(tokens) - 1), tokens[1:]]


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("how", ["full", "lora", "checkpointed", "fused"])
def test_packed_equals_one_by_one_in_values_and_gradients(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK", 5)  # so that several chunks are crossed
    if how == "fused":
        monkeypatch.setattr(attention, "DENSE", 0)  # the kernel that longer sequences run with
    moe = name == "qwen3_moe"  # its grouped products refuse float64
    dtype = torch.float32 if moe else torch.float64
    rough = moe or name == "gemma2"  # whose eager attention takes its softmax in float32
    model = tiny(name, dtype=dtype)
    lora = None
    if how == "lora":
        lora = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
    engine = build_policy(model, dtype=dtype, lora=lora, checkpointing=how == "checkpointed")
    if how == "lora":
        for key, p in engine.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    rows = sequences()
    out = engine(plain_batch(rows)).logp
    with engine.stock():
        wanted = [oracle(engine.model, row) for row in rows]
    assert engine.packs
    flat = torch.cat([torch.cat([w.new_zeros(1), w]) for w in wanted])
    tolerance = 2e-5 if rough else 1e-12
    torch.testing.assert_close(out.double(), flat, rtol=tolerance, atol=tolerance * 10)
    slopes = torch.randn(len(flat), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = gradients(engine.model, (out * slopes).sum())
    with engine.stock():
        theirs = gradients(engine.model, (flat * slopes).sum())
    assert ours.keys() == theirs.keys()
    assert ours
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3 if rough else 1e-6, atol=1e-4 if rough else 1e-6)


def test_a_token_of_another_sequence_changes_nothing() -> None:
    engine = Engine(tiny())
    rows = sequences()
    before = engine(plain_batch(rows)).logp
    rows[0] = rows[0].flip(0)
    after = engine(plain_batch(rows)).logp
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])


def test_entropy_is_that_of_the_distribution() -> None:
    engine = Engine(tiny())
    rows = sequences()
    found = engine(plain_batch(rows), entropy=True).entropy
    assert found is not None
    with engine.stock():
        p = torch.softmax(engine.causal(input_ids=rows[0][None]).logits[0, :-1], -1)
    torch.testing.assert_close(found[1 : LENGTHS[0]], torch.distributions.Categorical(p).entropy(), rtol=1e-10, atol=1e-10)


def test_a_marked_first_token_is_an_error() -> None:
    from dataclasses import replace

    batch = plain_batch(sequences())
    with pytest.raises(ValueError, match="first token"):
        Engine(tiny())(replace(batch, mask=torch.ones_like(batch.mask)))


@pytest.mark.parametrize("packed", [True, False])
def test_an_adapter_in_bfloat16_starts_at_its_reference_exactly(packed: bool) -> None:
    """Also when activations are computed again; and gradients are those of the run that keeps them."""
    lora = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
    found: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16, lora=lora, checkpointing=checkpointing)
        policy.lay_out(packed=packed)
        batch = plain_batch(sequences())
        logp = policy(batch).logp
        assert logp.dtype == torch.float32
        assert torch.equal(logp, build_reference(policy, fresh_adapter=True)(batch))
        found.append(gradients(policy.model, logp.sum()))
    assert found[0].keys() == found[1].keys()
    assert {p.dtype for p in found[0].values()} == {torch.float32}
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-6, atol=1e-8, msg=key)


def test_bfloat16_over_float32_masters_keeps_float32_logits() -> None:
    """Masters stay float32; log-probabilities come out in float32 and near those of the float32 model."""
    exact = Engine(tiny(dtype=torch.float32))(plain_batch(sequences())).logp
    engine = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16)
    out = engine(plain_batch(sequences())).logp
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    assert out.dtype == torch.float32
    assert 0 < (out - exact).abs().max() < 0.3


def test_rounding_does_not_add_up_over_a_large_vocabulary() -> None:
    made = torch.Generator().manual_seed(0)
    logits, target = torch.randn(36, 49152, generator=made) * 4, torch.randint(0, 49152, (36,), generator=made)
    exact = torch.log_softmax(logits.double(), -1).gather(1, target[:, None]).squeeze(1)
    found: Tensor = head.TargetLogProb.apply(logits, target)  # type: ignore[assignment]
    assert abs((found.double() - exact).sum()) < 2e-5


def test_the_slope_of_a_log_probability() -> None:
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=made, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(head.TargetLogProb.apply, (logits, torch.tensor([3, 0, 10, 3, 7])))
