"""``train.max_steps`` decides the number of steps, whatever ``train.epochs`` is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.training.resuming import Undisturbed, facts, killed, records, resumed_steps, train
from valence.config.load import load_recipe
from valence.training.plan import describe, make_plan
from valence.training.prepare import prepare

EPOCH = 3
"""Steps of an epoch: twelve rows in steps of four."""


@pytest.mark.parametrize("steps", [1, EPOCH, 2 * EPOCH + 2])
@pytest.mark.parametrize("epochs", [None, 1, 10])
def test_exactly_that_many_steps_are_planned(
    steps: int, epochs: int | None, settings: dict[str, Any]
) -> None:
    settings["train"] |= {"max_steps": steps}
    if epochs is None:
        del settings["train"]["epochs"]
    else:
        settings["train"]["epochs"] = epochs
    prepared = prepare(load_recipe(settings))
    assert prepared.total_steps == steps
    plan = make_plan(prepared)
    (line,) = [line for line in describe(plan) if line.startswith("steps:")]
    assert line.startswith(f"steps: {steps} ({EPOCH} per epoch")
    # a written number of epochs is not ignored silently
    assert ("train.epochs" in line) == (epochs is not None)


def test_epochs_are_repeated_until_then(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["train"] |= {"epochs": 1, "max_steps": 2 * EPOCH + 1}
    settings["run"]["log_every"] = 1
    del settings["data"]["eval"], settings["eval"]
    run, _ = train(settings)
    assert run.step == 2 * EPOCH + 1
    assert facts(tmp_path / "run")["total_steps"] == 2 * EPOCH + 1
    epochs = [row["epoch"] for row in records(tmp_path / "run")]
    assert epochs == pytest.approx([step / EPOCH for step in range(1, 2 * EPOCH + 2)])
    sampler = run.prepared.sampler
    rows = Counter(i for step in range(2 * EPOCH) for i in sampler.step(step)[0])
    assert dict(rows) == dict.fromkeys(range(12), 2)


def test_a_killed_run_resumes_to_the_same_end(
    settings: dict[str, Any], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The undisturbed run has three epochs of three steps."""
    settings["train"] |= {"epochs": 1, "max_steps": 3 * EPOCH}
    killed(settings, 6)
    run, _ = train(settings)
    assert resumed_steps(tmp_path / "run") == [4]
    undisturbed.assert_same(run, tmp_path / "run")


def test_more_steps_than_the_epochs_of_a_run_continue_it(
    settings: dict[str, Any], killed_run: Path
) -> None:
    settings["train"]["max_steps"] = 3 * EPOCH + 1
    run, _ = train(settings)
    assert resumed_steps(killed_run) == [4]
    assert run.step == 3 * EPOCH + 1


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ({"epochs": 3}, {"epochs": 3, "max_steps": 9}, None),
        ({"epochs": 1, "max_steps": 9}, {"epochs": 3}, None),
        ({"epochs": 3, "max_steps": 9}, {"epochs": 1, "max_steps": 9}, None),
        ({"epochs": 3, "max_steps": 9}, {"epochs": 3, "max_steps": 8}, ["train.max_steps"]),
        ({"epochs": 2, "max_steps": 9}, {"epochs": 2}, ["train.max_steps"]),
    ],
)
def test_only_a_shorter_run_needs_permission(
    before: dict[str, Any],
    after: dict[str, Any],
    names: list[str] | None,
    settings: dict[str, Any],
) -> None:
    rates = {"batch_size": 4, "learning_rate": 1e-3}
    settings["train"] = rates | before
    killed(settings, 3)
    settings["train"] = rates | after
    if names is None:
        run, _ = train(settings)
        assert run.step == 9
        return
    with raises_error("run-differs") as raised:
        train(settings)
    assert [
        name for name in ("train.epochs", "train.max_steps") if name in raised.error.message
    ] == names


def test_a_finished_run_names_the_setting_that_makes_it_longer(
    settings: dict[str, Any],
) -> None:
    settings["train"] |= {"max_steps": 2}
    train(settings)
    settings["train"]["epochs"] = 20
    run, output = train(settings)
    assert run.step == 2
    assert "set train.max_steps above 2" in output
