"""Several methods in one step, and a synced reference: the combined loss and gradient, and exact
resuming.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import check_error, raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.units import objective, policy_and_reference, units
from valence.api import build_run
from valence.config.load import load_recipe
from valence.errors import UserError
from valence.models.reference import SyncedReference
from valence.training.callbacks import CallbackLike
from valence.training.step import AuxiliaryLoss, optimizer_step
from valence.training.trainer import Trainer

THUMBS = [
    {"prompt": f"question {i} ", "completion": f"answer {i} {i}", "label": i % 3 == 0}
    for i in range(12)
]
SHOWN = [{"prompt": f"ask {i} ", "completion": f"good {i}"} for i in range(5)]
PAIRS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(8)
]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    data = {"train": [{"path": written(tmp_path / "train.jsonl", THUMBS)}], "max_length": 64}
    base = {
        "method": "kto",
        "model": {"name": "tiny"},
        "data": data,
        "train": {"batch_size": 4, "learning_rate": 1e-2},
    }
    return base | sections


def run_of(
    tmp_path: Path,
    folder: str = "run",
    callbacks: Sequence[CallbackLike] = (),
    **sections: Any,
) -> Trainer:
    tokenizer = tiny_tokenizer()
    model = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    sections = {"run": {"dir": str(tmp_path / folder)}} | sections
    return build_run(
        recipe(tmp_path, **sections),
        tokenizer=tokenizer,
        model=model,
        callbacks=callbacks,
        quiet=True,
    )


@pytest.mark.parametrize("budget", [10_000, 25])
def test_each_method_is_averaged_over_its_rows(budget: int) -> None:
    """The gradient of the step is the weighted sum of the gradients of two separate steps, however
    many rows each has.
    """
    policy, reference = policy_and_reference()
    judged, shown = units("judgement", 7), units("demonstration", 3, seed=1)
    alone: list[torch.Tensor] = []
    losses: list[float] = []
    for name, rows in (("kto", judged), ("sft", shown)):
        policy.zero_grad()
        losses.append(
            float(objective(name, policy, reference, budget=budget).run(rows, backward=True).loss)
        )
        alone.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    before = torch.cat([p.detach().flatten() for p in policy.parameters() if p.grad is not None])
    share = AuxiliaryLoss("sft", objective("sft", policy, reference, budget=budget), 0.25, shown)
    sgd = torch.optim.SGD(policy.parameters(), lr=1.0)
    main = objective("kto", policy, reference, budget=budget)
    outcome, _, applied = optimizer_step(main, sgd, judged, None, [share])
    assert applied
    assert float(outcome.loss) == pytest.approx(losses[0] + 0.25 * losses[1], rel=1e-12)
    moved = before - torch.cat([p.detach().flatten() for p in policy.parameters()])
    torch.testing.assert_close(moved, alone[0] + 0.25 * alone[1], rtol=1e-9, atol=1e-12)
    assert {"rewards/chosen", "sft/loss", "sft/logps/token"} <= outcome.metrics.keys()


def test_a_run_trains_with_a_mix_and_logs_it(tmp_path: Path) -> None:
    mix = [
        {
            "method": "sft",
            "train": written(tmp_path / "shown.jsonl", SHOWN),
            "weight": 0.5,
            "batch_size": 2,
        }
    ]
    run = run_of(tmp_path, mix=mix)
    last = run.fit()
    assert run.step == 3
    assert last["loss"] > last["sft/loss"] * 0.5
    assert run.state.counters.examples_seen == 12 + 5


def test_a_mixed_method_trains_at_a_temperature_of_one() -> None:
    """Whatever the policy is sampled at."""
    policy, reference = policy_and_reference()
    judged, shown = units("judgement", 7), units("demonstration", 3, seed=1)
    share = AuxiliaryLoss("sft", objective("sft", policy, reference), 0.25, shown)
    wanted = float(objective("sft", policy, reference).run(shown, backward=False).loss)
    policy.temperature = 0.5
    sgd = torch.optim.SGD(policy.parameters(), lr=0.0)
    outcome, _, _ = optimizer_step(objective("kto", policy, reference), sgd, judged, None, [share])
    (result,) = outcome.metrics["sft/loss"]
    assert float(result.total) == pytest.approx(wanted, rel=1e-12)
    assert policy.temperature == 0.5


def test_mistakes_in_a_mix_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "shown.jsonl", SHOWN)
    for part, code, where, fix in (
        (
            {"method": "sft", "train": path, "loss": {"beta": 1}},
            "setting-unknown",
            "mix.0.loss.beta",
            "",
        ),
        ({"method": "stf", "train": path}, "method-unknown", "mix.0.method", "sft"),
        ({"method": "sft"}, "setting-missing", "mix.0.train", ""),
        ({"method": "sft", "train": path, "weight": -1}, "setting-type", "mix.0.weight", ""),
    ):
        with raises_error(code, where=where, fix=fix):
            load_recipe(recipe(tmp_path, mix=[part]))
    with pytest.raises(UserError) as info:
        load_recipe(
            recipe(tmp_path, mix=[{"method": "sft", "train": str(tmp_path / "none.jsonl")}]),
        )
    check_error(info.value, info.value.code, where="mix.0.train.0.path", fix="shown.jsonl")
    with raises_error("kind-mismatch", where="shown.jsonl:1"):
        run_of(tmp_path, mix=[{"method": "dpo", "train": path}])


def test_class_weights_auto_make_both_classes_count_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path, loss={"class_weights": "auto"})
    assert run.state.objective.settings["desirable_weight"] == 2.0  # 4 up, 8 down
    assert run.state.objective.settings["undesirable_weight"] == 1.0
    with raises_error("setting-no-effect", where="loss.desirable_weight", fix="loss.class_weights"):
        run_of(tmp_path, loss={"class_weights": "auto", "desirable_weight": 2.0})


def copies_of_weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.state.trained_weights.items()}


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_reference_that_follows_is_the_policy_of_the_last_sync(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    weights: dict[int, dict[str, torch.Tensor]] = {}

    def compare(run: Trainer, record: Any) -> None:
        assert isinstance(run.reference, SyncedReference)
        weights[run.step] = copies_of_weights(run)
        last_sync = weights[run.step - run.step % 2]
        assert all(torch.equal(p, last_sync[name]) for name, p in run.reference.weights.items())

    run = run_of(
        tmp_path,
        callbacks=[compare],
        reference={"sync_every": 2},
        model={"name": "tiny", "lora": lora},
        train={"batch_size": 3, "learning_rate": 1e-2},
        run={"dir": str(tmp_path / "run"), "log_every": 1},
    )
    weights[0] = copies_of_weights(run)
    run.fit()
    assert run.step == 4
    assert sorted(weights) == [0, 1, 2, 3, 4]
    assert any(not torch.equal(p, weights[0][name]) for name, p in weights[2].items())


def test_a_soft_sync_goes_part_of_the_way(tmp_path: Path) -> None:
    run = run_of(tmp_path, reference={"sync_every": 1, "sync_mix": 0.25})
    assert isinstance(run.reference, SyncedReference)
    before = {name: p.clone() for name, p in run.reference.weights.items()}
    run.fit()
    trained = copies_of_weights(run)
    for name, p in run.reference.weights.items():
        assert p.requires_grad is False
        assert not torch.equal(p, trained[name])
        assert not torch.equal(p, before[name])
    expected = {name: 0.5 * p + 0.5 * trained[name] for name, p in before.items()}
    run.reference.follow({n: 2 * expected[n] - p for n, p in run.reference.weights.items()}, 0.5)
    assert all(
        torch.allclose(p, expected[name], atol=1e-6) for name, p in run.reference.weights.items()
    )


def test_state_holds_the_moved_reference_and_every_delta(tmp_path: Path) -> None:
    """A run resumed after two steps ends as an undisturbed one."""
    sections: dict[str, Any] = {
        "method": "bco",
        "reference": {"sync_every": 1, "sync_mix": 0.5},
        "loss": {"humanline": [-1.0, 1.5]},
        "mix": [
            {
                "method": "bco_pair",
                "train": written(tmp_path / "pairs.jsonl", PAIRS),
                "batch_size": 3,
            }
        ],
    }
    full = run_of(tmp_path, **sections)
    full.fit()
    assert full.state.objective.shift.steps == 3
    assert full.state.objective.shift.delta != 0 != full.state.auxiliary[0][1].shift.delta
    first = run_of(tmp_path, "first", **sections)
    first.state.total_steps = 2
    first.fit()
    state = first.state_dict()
    state = copy.deepcopy(state)
    second = run_of(tmp_path, "second", **sections)
    second.load_state_dict(state)
    second.fit()
    assert [o.shift for o in second.state.objectives] == [o.shift for o in full.state.objectives]
    for one, other in zip(
        full.state.trained_weights.values(), second.state.trained_weights.values(), strict=True
    ):
        assert torch.equal(one, other)
    assert isinstance(full.reference, SyncedReference)
    assert isinstance(second.reference, SyncedReference)
    assert all(
        torch.equal(p, second.reference.weights[name]) for name, p in full.reference.weights.items()
    )


def test_a_finished_run_is_measured_with_its_own_threshold(tmp_path: Path) -> None:
    """bco's delta belongs to what a run is, also where nothing trains."""
    run = run_of(tmp_path, method="bco")
    run.fit()
    run.state.load_model(state := run.state_dict())
    before = run.evaluate(THUMBS).metrics["loss"]
    other = run_of(tmp_path, "other", method="bco")
    other.state.load_model(state)
    assert run.state.objective.shift.delta != 0
    assert other.evaluate(THUMBS).metrics["loss"] == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(("part", "code", "where"), [
    ({"method": "ipo", "loss": {"ld_alpha": 0.3}}, "setting-conflict", "mix.0.loss.ld_alpha"),
    (
        {"method": "kto", "loss": {"class_weights": "auto", "desirable_weight": 9.0}},
        "setting-no-effect", "mix.0.loss.desirable_weight",
    ),
    ({"method": "dpo", "loss": {"f_alpha": 0.3}}, "setting-no-effect", "mix.0.loss.f_alpha"),
    ({"method": "pointwise"}, "setting-conflict", "mix"),
])  # fmt: skip
def test_settings_of_a_mixed_loss_are_checked_like_those_of_the_main_one(
    tmp_path: Path, part: dict[str, Any], code: str, where: str
) -> None:
    with raises_error(code, where=where):
        load_recipe(
            recipe(tmp_path, mix=[{**part, "train": written(tmp_path / "more.jsonl", THUMBS)}]),
        )


def test_all_turns_of_demonstrations_in_a_mix_may_train(tmp_path: Path) -> None:
    settings = recipe(
        tmp_path, mix=[{"method": "sft", "train": written(tmp_path / "shown.jsonl", SHOWN)}]
    )
    settings["data"]["train_on"] = "assistant"
    assert load_recipe(settings).recipe.data.train_on == "assistant"


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [([1.5, -1.0], [0, 1]), ([0.5, 1.0], [0]), ([-1.0, 0.0], [1])],
)
def test_a_range_of_log_ratios_holds_zero(
    tmp_path: Path,
    limits: list[float],
    wrong: list[int],
) -> None:
    with pytest.raises(UserError) as info:
        load_recipe(recipe(tmp_path, loss={"humanline": limits}))
    places = [problem.where for problem in info.value.problems]
    assert places == [f"recipe (loss.humanline.{i})" for i in wrong]


def test_a_moving_reference_is_not_cached(tmp_path: Path) -> None:
    with raises_error("setting-conflict", where="reference.cache", fix="reference.sync_every"):
        run_of(tmp_path, reference={"sync_every": 1, "cache": str(tmp_path / "kept")})
    run_of(tmp_path, reference={"sync_every": 1}).fit()
    assert not (tmp_path / "run" / "reference").exists()
