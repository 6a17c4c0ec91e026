"""Mistakes of other systems with steps, averages and runs that no other test covers (see
dev/pitfalls.md).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import valence
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.units import objective, policy_and_reference, unit, units
from valence.distributed.process_group import SingleProcess
from valence.losses import LOSSES, Loss, stats
from valence.losses.views import seq_view, token_columns, token_view
from valence.models.build import build_policy, build_reference
from valence.models.reference import FrozenReference
from valence.training.step import Objective
from valence.training.trainer import Trainer
from valence.types import PolicyOutput, TokenizedExample


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"question {i} ",
            "completion": f"{'good' if i % 2 else 'bad'} answer {i}",
            "label": bool(i % 2),
        }
        for i in range(offset, offset + count)
    ]


def train(
    tmp_path: Path, value: list[dict[str, Any]], **sections: Any
) -> tuple[Trainer, list[dict[str, Any]]]:
    """A run on a tiny model, and its log."""
    held_out = sections.pop("held_out", None)
    recipe = {
        "method": "kto",
        "model": {"name": "tiny", **sections.pop("model", {})},
        "run": {"dir": str(tmp_path / "run")},
    }
    run = valence.train(
        recipe | sections,
        model=tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32),
        tokenizer=tiny_tokenizer(),
        train=value,
        eval=held_out,
        quiet=True,
    )
    return run, [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]


# The reference point


def test_the_reference_point_divides_the_sum_of_all_by_the_count_of_all() -> None:
    """Parts of unequal size: the mean of their means would be another number."""
    parts = torch.tensor([[6.0, 1.0], [2.0, 3.0]])  # sum, count
    z0, raw = stats.reference_point(parts.sum(0)[:, None])
    assert z0.item() == raw.item() == 8 / 4
    assert (parts[:, 0] / parts[:, 1]).mean() != 8 / 4


def test_the_reference_point_is_clamped_once_after_the_sum() -> None:
    """Parts below and above zero: clamping each before adding them would be biased upward."""
    parts = torch.tensor([[-4.0, 1.0], [2.0, 1.0]])
    z0, raw = stats.reference_point(parts.sum(0)[:, None])
    assert (z0.item(), raw.item()) == (0.0, -1.0)


class WithAnother(SingleProcess):
    """One of two processes. The other one has other rows and adds the same value to every sum."""

    def __init__(self, sums: dict[tuple[int, ...], Tensor]) -> None:
        self.sums = sums

    def sum(self, values: Tensor) -> Tensor:
        return values + self.sums[tuple(values.shape)].to(values)


@pytest.mark.parametrize("budget", [10_000, 30], ids=["together", "apart"])
def test_counts_and_the_reference_point_are_those_of_all_processes(budget: int) -> None:
    policy, reference = policy_and_reference()
    step = units("judgement", 5)

    def run(name: str, group: SingleProcess) -> tuple[float, dict[str, float]]:
        actual = objective(name, policy, reference, budget=budget)
        actual.group = group
        outcome = actual.run(step, backward=True)
        assert (outcome.micro_batches == 1) is (budget == 10_000)
        means = {key: parts[0] for key, parts in outcome.metrics.items() if key.startswith("kl")}
        return float(outcome.loss), {
            key: float(mean.total / mean.count) for key, mean in means.items()
        }  # type: ignore[union-attr]

    _, alone = run("kto", SingleProcess())
    _, both = run(
        "kto",
        WithAnother(
            {(2, 1): torch.tensor([[30.0], [3.0]]), (1,): torch.tensor([3]), (4,): torch.zeros(4)}
        ),
    )
    assert both["kl/raw"] == pytest.approx((alone["kl/raw"] * 5 + 30) / (5 + 3))
    assert both["kl"] == max(0.0, both["kl/raw"])
    full, _ = run("apo_zero_unpaired", SingleProcess())
    more, _ = run(
        "apo_zero_unpaired",
        WithAnother({(1,): torch.tensor([3]), (4,): torch.tensor([3.0, 0, 0, 0])}),
    )
    assert more == pytest.approx(full * 5 / (5 + 3) + 3)


@pytest.mark.parametrize(("budget", "extra", "passes"), [
    (10_000, 10_000, [True]),  # all in one pass
    (10_000, 0, [True, False]),  # over the keys and values of those that train
    (30, 0, [False] * 3 + [True] * 2),  # in separate passes
])  # fmt: skip
def test_mismatched_rows_run_without_a_graph(budget: int, extra: int, passes: list[bool]) -> None:
    """Sequences without a gradient are detached where they run with the others: see the losses'
    contract.
    """
    policy, reference = policy_and_reference()
    policy.max_joint_rows = extra
    actual = objective("kto", policy, reference, budget=budget)
    with_grad: list[bool] = []
    policy.causal.model.register_forward_pre_hook(
        lambda *_: with_grad.append(torch.is_grad_enabled())
    )
    actual.run(units("judgement", 5), backward=True)
    assert with_grad == passes


def test_class_weights_and_the_reference_are_the_same_under_an_adapter() -> None:
    """The adapter switched off is the model it started from: loss, statistic and gradient as with a
    frozen copy.
    """
    lora = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
    policy = build_policy(tiny(), dtype=torch.float64, lora=lora)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    off = build_reference(policy, fresh_adapter=True)
    copy = build_reference(policy, fresh_adapter=False, model=tiny())
    assert isinstance(copy, FrozenReference)
    settings: dict[str, Any] = {"desirable_weight": 1.3, "undesirable_weight": 0.4}
    results: list[tuple[float, Tensor]] = []
    for reference in (off, copy):
        policy.zero_grad()
        outcome = objective("kto", policy, reference, **settings).run(
            units("judgement"), backward=True
        )
        results.append(
            (
                float(outcome.loss),
                torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]),
            )
        )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=1e-12)
    plain = objective("kto", policy, copy).run(units("judgement"), backward=False)
    assert float(plain.loss) != pytest.approx(results[0][0], rel=1e-3)


# Averages


def test_lengths_are_counted_from_the_mask_and_not_from_values() -> None:
    """A log-probability of exactly 0 is a token like any other."""
    (batch,) = _objective().divide(units("judgement", 3)).local
    zeros = torch.zeros(len(batch.tokens), dtype=torch.float64)
    columns = token_columns(batch, PolicyOutput(zeros), zeros)
    view = seq_view(batch, columns)
    assert view["n"].tolist() == [len(u.answers[0].ids) for u in units("judgement", 3)]
    assert len(token_view(batch, columns)["logp_t"]) == sum(view["n"].tolist())


def test_views_hold_one_number_per_sequence_pair_or_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """No [S] is ever spread over a [S, T]: every named tensor of a view has the same single
    axis.
    """
    calls: list[tuple[dict[str, Tensor], Tensor]] = []
    compute = Loss.__call__

    def spied(self: Loss, view: Any, settings: Any) -> Tensor:
        calls.append((dict(view), result := compute(self, view, settings)))
        return result

    monkeypatch.setattr(Loss, "__call__", spied)
    policy, reference = policy_and_reference()
    for name, loss in LOSSES.items():
        if loss.is_reward_model:
            continue
        rows = units(loss.data, 4)
        sequences = [answer.ids for unit in rows for answer in unit.answers]
        calls.clear()
        objective(name, policy, reference).run(rows, backward=False)
        (view, losses), tokens = calls.pop(), (sum(map(len, sequences)),)
        expected = {
            "seq": (4,),
            "pair": (4,),
            "token": tokens,
            "answer": (
                len(
                    sequences,
                ),
            ),
        }[loss.view]
        for key, values in view.items():
            axis = tokens if loss.view == "answer" and key.endswith("_t") else expected
            assert key in OF_THE_STEP or tuple(values.shape) == axis, (name, key)
        assert losses.shape == expected


OF_THE_STEP = ("delta", "moments")
"""What views hold besides, of the whole step."""


def test_a_row_counts_as_one_however_long_it_is() -> None:
    """The gradient of kto with respect to a token does not know how many tokens its row has."""
    short, long = (
        unit("a", "judgement", (5,), ids, label=True) for ids in ((7, 8), tuple(range(10, 40)))
    )
    result = _objective("apo_zero_unpaired")
    (batch,) = result.divide([short, long]).local
    logp = torch.zeros(len(batch.tokens), dtype=torch.float64, requires_grad=True)
    view = seq_view(
        batch, token_columns(batch, PolicyOutput(logp), torch.zeros_like(logp.detach()))
    )
    result.method.loss(view, result.settings).sum().backward()
    assert logp.grad is not None
    assert len(set(logp.grad[batch.loss_mask].tolist())) == 1


def _objective(name: str = "kto") -> Objective:
    policy, reference = policy_and_reference()
    return objective(name, policy, reference)


# Runs


@pytest.mark.parametrize(("count", "batch_size", "epochs", "steps"), [
    (3, 16, 2, 2), (5, 4, 2, 4),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 16, 1, 1), (16, 16, 1, 1)]),
])  # fmt: skip
def test_data_smaller_than_a_batch_is_trained_on(
    count: int, batch_size: int, epochs: int, steps: int, tmp_path: Path
) -> None:
    inputs = rows(count)
    run, log = train(
        tmp_path, inputs, method="apo_zero_unpaired",
        train={"batch_size": batch_size, "epochs": epochs, "learning_rate": 1e-2},
    )  # fmt: skip
    assert [record["step"] for record in log] == list(range(1, steps + 1))
    assert log[-1]["examples_seen"] == count * epochs
    assert run.step == run.total_steps == steps
    fresh = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
    moved = [
        not torch.equal(a, b)
        for a, b in zip(run.policy.parameters(), fresh.parameters(), strict=True)
    ]
    assert any(moved)


def test_warm_up_and_decay_follow_the_steps_of_the_run(tmp_path: Path) -> None:
    inputs = rows(20)
    train_section = {
        "batch_size": 4,
        "epochs": 2,
        "learning_rate": 1e-3,
        "warmup": 0.2,
        "schedule": "linear",
    }
    _, log = train(tmp_path, inputs, train=train_section)
    assert [record["lr"] for record in log] == pytest.approx(
        [1e-3 * f for f in (0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)]
    )


@pytest.mark.parametrize(
    "count", [7, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3))]
)
def test_evaluation_measures_every_held_out_row_once_and_no_other(
    count: int, tmp_path: Path
) -> None:
    """Also fewer rows than a step or a micro-batch has, with a tail, and without touching the rows
    trained on.
    """
    held_out = rows(count, offset=100)
    run, _ = train(
        tmp_path,
        rows(8),
        held_out=held_out,
        train={"batch_size": 4, "micro_batch_tokens": 40, "max_steps": 1},
    )
    result = run.evaluate()
    assert [row["completion"] for row in result.rows] == [row["completion"] for row in held_out]
    for name, label in (("chosen", True), ("rejected", False)):
        rewards = [row["reward"] for row in result.rows if row["label"] is label]
        assert result.metrics[f"rewards/{name}"] == pytest.approx(
            sum(rewards) / len(rewards), rel=1e-5
        )


def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    run, _ = train(
        tmp_path,
        rows(8),
        held_out=rows(5, offset=100),
        train={"batch_size": 4, "learning_rate": 1e-2},
    )
    before = {name: p.clone() for name, p in run.policy.named_parameters()}
    random = torch.get_rng_state()
    first, second = run.evaluate(), run.evaluate()
    assert first == second
    assert torch.equal(torch.get_rng_state(), random)
    assert all(
        torch.equal(p, before[name]) and p.grad is None for name, p in run.policy.named_parameters()
    )
    assert run.policy.training


def test_the_reference_stays_where_the_policy_started(tmp_path: Path) -> None:
    """At evaluation, after training too."""
    held_out = rows(6, offset=100)
    for name, model in (("full", {}), ("adapter", {"lora": {"rank": 4}})):
        options = {"batch_size": 4, "learning_rate": 2e-2, "epochs": 1}
        run, log = train(tmp_path / name, rows(8), held_out=held_out, model=model, train=options)
        assert log[0]["eval/rewards/chosen"] == pytest.approx(0, abs=1e-6)
        after = run.evaluate().rows
        untouched = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
        start = valence.logprobs(untouched, held_out, tokenizer=tiny_tokenizer(), kind="judgement")
        assert [row["ref"] for row in after] == pytest.approx(
            [result.total for result in start], rel=1e-4
        )
        assert any(abs(row["logp"] - row["ref"]) > 1e-2 for row in after)


def test_a_pass_over_rows_leaves_them_as_they_were() -> None:
    policy, reference = policy_and_reference()
    step: list[TokenizedExample] = units("judgement", 6)
    before = [replace(u) for u in step]
    objective("kto", policy, reference, max_length=12).run(step, backward=True)
    assert step == before


def test_held_out_rows_without_partners_are_refused_before_training(tmp_path: Path) -> None:
    """Rows of one prompt cannot be measured by kto, and this must not be found out when the
    training is over.
    """
    same = [row | {"prompt": "the same question "} for row in rows(4)]
    with raises_error("kl-pairs-missing", where="rows in memory:1"):
        train(tmp_path, rows(4), held_out=same, eval={"at_start": False})
    assert not (tmp_path / "run/metrics.jsonl").exists()
