"""Online runs that collapsed or have nothing left to learn: the warnings, and how such a run
ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.training.online.recipes import logged, make, recipe, recipe_without_eval
from tests.training.resuming import facts, killed, train, weights
from valence.reports.diagnostics import CollapseDetector, diagnose
from valence.reports.page import render_report, report_markdown
from valence.reports.run_record import RunRecord
from valence.rollouts import HFGenerator
from valence.training.collector import distinct_4grams, duplicates
from valence.types import Completion

CONSTANT = "tests.training.online.rewards:constant"
RIGHT_AFTER = "tests.training.online.rewards:solved_after"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def warned_at(place: Path, name: str) -> list[int]:
    """The steps with a warning that begins as the text of this sign does."""
    (message,) = [
        sign.message for sign in diagnose(RunRecord.read(place / "run")) if sign.name == name
    ]
    warnings = facts(place / "run")["warnings"]
    words = re.compile(r"step (\d+): " + re.escape(message[:12]))
    return [int(result[1]) for result in map(words.match, warnings) if result]


def test_a_run_without_a_gradient_warns_ends_and_is_finished(place: Path) -> None:
    """It has a model, an evaluation of its last step, and its reason in the summary."""
    settings = recipe(
        place, reward=CONSTANT, train={"max_steps": 24, "max_zero_gradient_steps": 7},
        eval={"every": 100.0},
    )  # fmt: skip
    run, _ = train(settings)
    rows = logged(place)
    assert run.step == rows[-1]["step"] == 7
    assert "eval/reward/mean" in rows[-1]
    assert warned_at(place, "no gradient") == [5]
    assert facts(place / "run")["status"] == "done"
    assert "max_zero_gradient_steps: 7" in facts(place / "run")["ended_early"]
    assert (place / "run/model/model.safetensors").is_file()
    assert run.saver is not None
    assert run.saver.checkpoints.steps()[-1] == 7
    data = RunRecord.read(place / "run")
    shown = [sign for sign in diagnose(data) if sign.name in ("saturated reward", "no gradient")]
    assert (
        [
            sign.name
            for sign in diagnose(
                data,
            )
        ][:2]
        == [sign.name for sign in shown]
        == ["saturated reward", "no gradient"]
    )
    # At the top of both reports, once.
    warning, page, text = shown[1].message, render_report(data), report_markdown(data)
    assert page.count(warning) == text.count(warning) == 1
    assert page.index(warning) < page.index("<dl")
    assert text.index(warning) < text.index("\n|")


def test_without_a_limit_a_run_continues_without_a_gradient(place: Path) -> None:
    run, _ = train(
        recipe_without_eval(
            place,
            reward=CONSTANT,
            train={"max_steps": 2, "max_zero_gradient_steps": None},
        ),
    )
    assert run.step == 2
    assert "ended_early" not in facts(place / "run")


def test_steps_without_a_gradient_are_counted_in_a_row(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single step with one begins the count again: rewards differ in every third round."""
    monkeypatch.setattr("tests.training.online.rewards.period", 3)
    monkeypatch.setattr("tests.training.online.rewards.calls_of_now_and_then", [])
    reward = "tests.training.online.rewards:now_and_then"
    settings = recipe_without_eval(
        place,
        reward=reward,
        train={"max_steps": 7, "max_zero_gradient_steps": 3},
    )
    run, _ = train(settings)
    assert [row["grad_norm"] > 0 for row in logged(place)] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert run.step == 7


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_step(place: Path) -> None:
    options = {"max_steps": 30, "max_zero_gradient_steps": 6}
    full, _ = train(
        recipe(place, reward=CONSTANT, train=options, run={"dir": str(place / "whole")})
    )
    settings = recipe(place, reward=CONSTANT, train=options)
    killed(settings, 5)
    again, _ = train(settings)
    assert again.step == full.step == 6
    assert again.state.collapse.state_dict() == full.state.collapse.state_dict()
    assert logged(place) == logged(place, "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())


def test_a_run_that_ended_early_resumes_with_a_larger_limit(place: Path) -> None:
    first = recipe_without_eval(
        place,
        reward=CONSTANT,
        train={"max_steps": 30, "max_zero_gradient_steps": 2},
    )
    run, _ = train(first)
    again, _ = train(first)
    assert (run.step, again.step, again.finished) == (2, 2, True)
    more = recipe_without_eval(
        place,
        reward=CONSTANT,
        train={"max_steps": 30, "max_zero_gradient_steps": 3},
    )
    longer, _ = train(more, allow=["train.max_zero_gradient_steps"])
    assert longer.step == 2 + 3


def test_rounds_with_nothing_to_teach_end_a_run_that_has_learned(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dapo replaces tied groups, so it runs out of rounds and not of gradients. Before the first
    step, or without a limit, it is an error."""
    monkeypatch.setattr("tests.training.online.rewards.solved", [])
    settings = recipe_without_eval(place, "dapo", reward=RIGHT_AFTER, rollout={"max_resample": 1})
    run, _ = train(settings)
    assert 0 < run.step < 6
    assert facts(place / "run")["status"] == "done"
    assert facts(place / "run")["ended_early"].startswith("2 ")  # rounds in a row
    assert (place / "run/model/model.safetensors").is_file()
    monkeypatch.setattr("tests.training.online.rewards.solved", [])
    settings["train"] |= {"max_zero_gradient_steps": None}
    with raises_error("nothing-to-learn", where=f"step {run.step}"):
        train(settings, fresh=True)


def test_a_policy_that_only_repeats_itself_is_warned_of(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = HFGenerator.generate

    def generate(self: HFGenerator, *args: Any, **options: Any) -> list[list[Completion]]:
        groups = plain(self, *args, **options)
        return [
            [replace(c, tokens=(5,) * 12, logps=(-1.0,) * 12) for c in group] for group in groups
        ]

    monkeypatch.setattr(HFGenerator, "generate", generate)
    train(recipe_without_eval(place, rollout={"max_new_tokens": 12}, train={"max_steps": 4}))
    rows = logged(place)
    assert all(row["rollout/duplicates"] == 1 for row in rows)
    assert all(row["rollout/distinct_4grams"] == pytest.approx(1 / 9) for row in rows)
    assert warned_at(place, "repetitive") == [3]
    assert sum("89%" in warning for warning in facts(place / "run")["warnings"]) == 1


def test_repetition_is_measured_in_tokens() -> None:
    assert distinct_4grams(range(20)) == 1
    assert distinct_4grams([1, 2] * 10) == 2 / 17
    assert distinct_4grams([1] * 7) is None
    assert duplicates([(1, 2), (1, 2), (3,), (4,)]) == [1, 1, 0, 0]
    assert duplicates([]) == []


def record(step: int, **changes: Any) -> dict[str, Any]:
    healthy: dict[str, Any] = {
        "reward/mean": 0.5, "reward/max": 1.0, "reward/min": 0.0, "rollout/tied": 0.2, "kl": 2.0,
        "rollout/length": 30.0, "rollout/distinct_4grams": 0.95, "rollout/duplicates": 0.0,
        "grad_norm": 0.3,
    }  # fmt: skip
    return {"step": step, **healthy, **changes}


def shown(records: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Which signs are shown at which step."""
    watch = CollapseDetector()
    return [(row["step"], sign.name) for row in records for sign in watch.observe(row)]


SIGNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "high kl": ({"kl": 40.0}, {"kl": 25.0}),  # of 30 tokens
    "saturated reward": ({"rollout/tied": 1.0, "reward/mean": 0.995}, {"rollout/tied": 1.0}),
    "repetitive": ({"rollout/distinct_4grams": 0.3}, {"rollout/distinct_4grams": 0.6}),
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_shown_once_it_lasts_and_not_in_a_healthy_run(name: str) -> None:
    bad, healthy = SIGNS[name]
    assert shown([record(step, **bad) for step in range(1, 9)]) == [(3, name)]
    assert shown([record(step, **healthy) for step in range(1, 9)]) == []
    assert shown([record(step, **(bad if step % 3 else {})) for step in range(1, 9)]) == []


def test_short_completions_may_be_certain_and_equal() -> None:
    """A single token that became certain is 3 nats away and is sampled every time."""
    short = {"rollout/length": 2.0, "kl": 6.0, "rollout/duplicates": 1.0}
    assert shown([record(step, **short) for step in range(1, 9)]) == []
    long = short | {"rollout/length": 20.0}
    assert shown([record(step, **long) for step in range(1, 9)]) == [(3, "repetitive")]


def test_a_divergence_that_grows_is_shown_again() -> None:
    rows = [record(step, kl=4.0 * 1.5**step) for step in range(1, 16)]
    steps = [step for step, name in shown(rows) if name == "high kl"]
    assert steps[0] == 7  # 1 nat per token at step 5
    assert len(steps) == 3
    assert all(rows[b - 1]["kl"] >= 4 * rows[a - 1]["kl"] for a, b in pairwise(steps))


def test_the_reference_point_of_kto_is_no_divergence() -> None:
    assert shown([record(step, **{"kl": 90.0, "kl/raw": 90.0}) for step in range(1, 9)]) == []
    rows = [record(step, **{"kl": 0.0, "kl/raw": 0.0, "rollout/kl": 90.0}) for step in range(1, 9)]
    assert shown(rows) == [(3, "high kl")]


def test_steps_without_a_gradient_are_counted_from_the_last_that_had_one() -> None:
    rows = [record(step, grad_norm=float(step < 4 or step == 20)) for step in range(1, 30)]
    assert shown(rows) == [(8, "no gradient"), (25, "no gradient")]
    rare = [record(step, grad_norm=0.0) for step in (10, 20)]  # means over ten steps each
    assert shown(rare) == [(10, "no gradient")]
