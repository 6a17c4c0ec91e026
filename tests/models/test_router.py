"""The load-balancing loss of mixture-of-experts models, against transformers and plain autograd."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.errors import raises_error
from tests.tiny_models import tiny
from tests.units import objective, unit
from valence.batching.micro_batches import make_micro_batch
from valence.config.schema import LoraSettings
from valence.models.build import build_policy, build_reference
from valence.models.check import plain_batch
from valence.models.checkpointing import Checkpointing
from valence.models.policy_model import PolicyModel
from valence.models.router import check_router, num_trained_tokens, token_weights
from valence.models.scores import Scorer
from valence.training.metrics import Meter
from valence.training.step import AuxiliaryLoss, optimizer_step
from valence.types import MicroBatch, TokenizedExample

WANT = ("router_aux_loss",)
WEIGHT = 0.7
PROMPT = tuple(range(3, 27))  # long enough to be shared
ROWS = [
    unit("a", "preference", PROMPT, (21, 22, 23), (31, 32)),
    unit("b", "preference", (*PROMPT, 41), (42, 43, 44, 45), (42, 43, 51)),
    unit("c", "preference", (61, 62), (63, 64, 65, 66, 67), (71,)),
]
UNPAIRED = [
    unit(f"{row.id}{side}", "judgement", row.prompt_ids, row.answers[side].ids, label=side == 0)
    for row in ROWS
    for side in (0, 1)
]


def policy(
    *, checkpointing: Checkpointing = "off", name: str = "qwen3_moe", **more: Any
) -> PolicyModel:
    model = tiny(name, dtype=torch.float32)
    return build_policy(model, dtype=torch.float32, checkpointing=checkpointing, **more)


def sequences(units: list[TokenizedExample]) -> list[tuple[int, ...]]:
    return [row.prompt_ids + answer.ids for row in units for answer in row.answers]


def plain_loss(engine: PolicyModel, units: list[TokenizedExample]) -> Tensor:
    """transformers' own function over the router logits of every sequence by itself, with its
    gradient.
    """
    with engine.stock():
        runs = [
            engine.causal(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
            for ids in sequences(units)
        ]
    gates = tuple(torch.cat(layer) for layer in zip(*runs, strict=True))
    return modeling_qwen3_moe.load_balancing_loss_func(gates, 4, 2)  # type: ignore[return-value]


def gradients(engine: PolicyModel) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in weights(engine)
        ]
    )


def weights(engine: PolicyModel) -> list[torch.nn.Parameter]:
    return [p for p in engine.parameters() if p.requires_grad]


def relative(result: Tensor, wanted: Tensor) -> float:
    return float((result - wanted).norm() / wanted.norm())


def step(
    engine: PolicyModel,
    weight: float,
    units: list[TokenizedExample],
    *,
    name: str = "cpo",
    budget: int = 10_000,
    shares: Any = (),
) -> tuple[Tensor, dict[str, float], Tensor, int]:
    """Loss, metrics, gradient and micro-batches of one step without a reference."""
    actual = objective(name, engine, None, budget=budget)
    actual.router_aux_loss = weight
    grads: list[Tensor] = []
    sgd = torch.optim.SGD(weights(engine), lr=0.0)
    sgd.register_step_pre_hook(lambda *_: grads.append(gradients(engine)))
    outcome, _, applied = optimizer_step(actual, sgd, units, None, shares)
    assert applied
    meter = Meter()
    meter.pool(outcome.metrics)
    return outcome.loss, meter.reduce(actual.group), grads[0], outcome.micro_batches


@pytest.mark.parametrize("packed", [True, False])
def test_the_value_is_that_of_transformers_on_one_sequence(packed: bool) -> None:
    engine = policy()
    engine.lay_out(packed=packed)
    tokens = torch.randint(3, 97, (23,), generator=torch.Generator().manual_seed(1))
    with engine.stock():
        aux_loss = engine.causal(input_ids=tokens[None], output_router_logits=True).aux_loss
    result = engine(plain_batch([tokens]), WANT).router_aux_loss
    assert result is not None
    assert result.item() == pytest.approx(aux_loss.item(), rel=1e-6)
    # the load is not uniform, where any routing would have this value
    assert abs(result.item() - 2) > 1e-3


@pytest.mark.parametrize(
    "checkpointing", ["off", pytest.param("selective", marks=pytest.mark.slow), "full"]
)
@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_is_that_of_plain_autograd(packed: bool, checkpointing: Checkpointing) -> None:
    plain = policy()
    wanted_loss = plain_loss(plain, ROWS)
    wanted_loss.backward()
    wanted = gradients(plain)
    engine = policy(checkpointing=checkpointing).train()
    engine.lay_out(packed=packed)
    loss = engine(make_micro_batch(ROWS), WANT).router_aux_loss
    assert loss is not None
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    loss.backward()
    assert wanted.norm() > 1e-3
    assert relative(gradients(engine), wanted) < 1e-5


def test_a_shared_token_counts_once_for_every_sequence_that_trains() -> None:
    batch = make_micro_batch(ROWS)
    counts = Counter(row for s in range(batch.sequences) for row in batch.rows(s).tolist())
    weights = token_weights(batch)
    assert weights.tolist() == [counts[row] for row in range(len(batch.tokens))]
    assert max(counts.values()) > 1
    assert len(batch.tokens) < num_trained_tokens(batch) == sum(map(len, sequences(ROWS)))
    assert int(weights.sum()) == num_trained_tokens(batch) == sum(row.tokens for row in ROWS)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("extra", [0, 48])
def test_sequences_without_gradient_do_not_count(packed: bool, extra: int) -> None:
    """KTO's mismatched completions, in a separate pass (extra 0) or in that of the others."""
    engine = policy()
    engine.lay_out(packed=packed)
    engine.max_joint_rows = extra
    ours, measured = (
        UNPAIRED[:2],
        [unit("other", "judgement", PROMPT, (81, 82, 83, 84), label=True)] * 2,
    )
    batch: MicroBatch = make_micro_batch(ours, kl_pairs=measured)
    assert not all(batch.requires_grad)
    result, alone = (engine(item, WANT).router_aux_loss for item in (batch, make_micro_batch(ours)))
    assert result is not None
    assert alone is not None
    assert result.item() == pytest.approx(alone.item(), rel=1e-6)
    assert num_trained_tokens(batch) == sum(row.tokens for row in ours)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["all weights", "lora"])
@pytest.mark.parametrize("name", ["cpo", "simpo"])
def test_a_step_adds_the_weighted_loss_and_its_gradient(
    name: str, lora: LoraSettings | None
) -> None:
    engine = policy(lora=lora)
    loss, _, gradient, _ = step(engine, 0.0, ROWS, name=name)
    with_router, metrics, its_gradient, micro_batches = step(engine, WEIGHT, ROWS, name=name)
    assert micro_batches == 1
    engine.zero_grad()
    wanted = plain_loss(engine, ROWS)
    wanted.backward()
    assert metrics["router_aux_loss"] == pytest.approx(wanted.item(), rel=1e-6)
    assert float(with_router) == pytest.approx(float(loss) + WEIGHT * wanted.item(), rel=1e-6)
    if lora is None:  # the second matrix of a new adapter is 0, and so is the gradient of the first
        assert gradients(engine).norm() > 1e-3
    assert gradients(engine).norm() > 0
    assert relative(its_gradient - gradient, WEIGHT * gradients(engine)) < 1e-4


def test_micro_batches_are_averaged_by_their_tokens() -> None:
    engine = policy()
    loss, _, gradient, _ = step(engine, 0.0, ROWS, budget=40)
    with_router, metrics, its_gradient, micro_batches = step(engine, WEIGHT, ROWS, budget=40)
    assert micro_batches > 1
    actual = objective("cpo", engine, None, budget=40)
    parts = [
        [ROWS[i] for i in sorted(set(batch.unit.tolist()))] for batch in actual.divide(ROWS).local
    ]
    total = sum(row.tokens for row in ROWS)
    engine.zero_grad()
    wanted = torch.stack(
        [sum(row.tokens for row in part) / total * plain_loss(engine, part) for part in parts]
    ).sum()
    wanted.backward()
    assert metrics["router_aux_loss"] == pytest.approx(wanted.item(), rel=1e-6)
    assert float(with_router) == pytest.approx(float(loss) + WEIGHT * wanted.item(), rel=1e-6)
    assert relative(its_gradient - gradient, WEIGHT * gradients(engine)) < 1e-4
    full = plain_loss(engine, ROWS).item()
    assert abs(wanted.item() - full) > 1e-3  # it depends on how the step is cut


def test_a_loss_over_all_micro_batches_together_has_the_term_too() -> None:
    """aot sorts the rows of the whole step, and runs each micro-batch twice."""
    engine = policy()

    def run(weight: float) -> tuple[Tensor, Tensor, dict[str, float]]:
        reference = build_reference(
            policy(), fresh_adapter=False, model=tiny("qwen3_moe", dtype=torch.float32, seed=5)
        )
        actual = objective("aot", engine, reference, budget=40)
        actual.router_aux_loss = weight
        engine.zero_grad()
        outcome = actual.run(ROWS, backward=True)
        assert outcome.micro_batches > 1
        meter = Meter()
        meter.pool(outcome.metrics)
        result = gradients(engine).clone()
        return (
            result,
            torch.zeros(()) if outcome.router_aux_loss is None else outcome.router_aux_loss,
            meter.reduce(actual.group),
        )

    gradient, nothing, _ = run(0.0)
    its_gradient, loss, metrics = run(WEIGHT)
    _, _, cut_gradient, _ = step(engine, WEIGHT, ROWS, budget=40)
    _, cut_metrics, plain, _ = step(engine, 0.0, ROWS, budget=40)
    assert nothing == 0
    assert "router_aux_loss" in metrics
    assert "router_aux_loss" not in cut_metrics
    assert float(loss) == pytest.approx(metrics["router_aux_loss"], rel=1e-6)
    assert relative(its_gradient - gradient, cut_gradient - plain) < 1e-4


def test_mixed_methods_share_one_average() -> None:
    """The weight of a method in `mix` does not multiply the routers' loss."""
    engine = policy()
    mixed = [unit("d", "demonstration", (81, 82), (83, 84, 85, 86))]

    def run(weight: float) -> tuple[Tensor, dict[str, float], Tensor, int]:
        sft = objective("sft", engine, None)
        sft.router_aux_loss = weight
        return step(engine, weight, ROWS, shares=[AuxiliaryLoss("sft", sft, 0.3, mixed)])

    loss, _, gradient, _ = run(0.0)
    with_router, metrics, its_gradient, _ = run(WEIGHT)
    counts = [sum(row.tokens for row in rows) for rows in (ROWS, mixed)]
    engine.zero_grad()
    wanted = sum(
        n / sum(counts) * plain_loss(engine, rows)
        for n, rows in zip(counts, (ROWS, mixed), strict=True)
    )
    assert isinstance(wanted, Tensor)
    wanted.backward()
    assert float(with_router) == pytest.approx(float(loss) + WEIGHT * wanted.item(), rel=1e-6)
    assert relative(its_gradient - gradient, WEIGHT * gradients(engine)) < 1e-4
    assert {"router_aux_loss", "sft/router_aux_loss"} <= metrics.keys()


@pytest.mark.parametrize("packed", [True, False])
def test_without_the_setting_no_router_logits_are_requested(
    packed: bool,
) -> None:
    engine = policy()
    engine.lay_out(packed=packed)
    decoder = getattr(engine.causal, engine.causal.base_model_prefix)
    requests: list[bool] = []
    handle = decoder.register_forward_pre_hook(
        lambda _module, _inputs, kwargs: requests.append(bool(kwargs.get("output_router_logits"))),
        with_kwargs=True,
    )
    loss, metrics, gradient, _ = step(engine, 0.0, ROWS)
    assert requests
    assert not any(requests)
    requests.clear()
    with_router, more, _, _ = step(engine, 1e-30, ROWS)
    handle.remove()
    assert all(requests)
    assert more.keys() - metrics.keys() == {"router_aux_loss"}
    assert {name: more[name] for name in metrics} == metrics
    assert torch.equal(with_router, loss)
    again, _, same_gradient, _ = step(engine, 0.0, ROWS)
    assert torch.equal(again, loss)
    assert torch.equal(same_gradient, gradient)


def test_an_evaluation_leaves_it_out() -> None:
    actual = objective("cpo", policy(), None)
    actual.router_aux_loss = WEIGHT
    outcome = actual.run(ROWS, backward=False)
    assert outcome.router_aux_loss is None
    assert "router_aux_loss" not in outcome.metrics


@pytest.mark.parametrize("packed", [True, False])
def test_a_reward_model_has_it_too(packed: bool) -> None:
    from transformers import AutoModelForSequenceClassification

    causal: Any = tiny("qwen3_moe", dtype=torch.float32)
    model: Any = AutoModelForSequenceClassification.from_config(causal.config)
    model.model.load_state_dict(causal.model.state_dict())
    engine = Scorer(model.float().eval())
    engine.lay_out(packed=packed)
    check_router(engine)
    result = engine(make_micro_batch(ROWS), WANT).router_aux_loss
    assert result is not None
    assert result.item() == pytest.approx(plain_loss(policy(), ROWS).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_model_without_a_router_loss_is_an_error(name: str) -> None:
    """deepseek_v3 has routers, which balance their load by a bias: transformers has no loss for
    them.
    """
    engine = PolicyModel(tiny(name, dtype=torch.float32))
    with raises_error("router-missing", where="train.router_aux_loss"):
        check_router(engine)


def test_a_mixture_of_experts_whose_layers_are_all_dense_is_an_error() -> None:
    with raises_error("router-missing", where="train.router_aux_loss"):
        check_router(PolicyModel(tiny("qwen3_moe", dtype=torch.float32, mlp_only_layers=[0, 1])))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phimoe-window"])
def test_models_with_routers_pass(name: str) -> None:
    check_router(PolicyModel(tiny(name, dtype=torch.float32)))
