"""Problems during training: bad steps, loss spikes, out of memory, full disks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.disk import full_disk, limit_file_size
from tests.errors import raises_error
from tests.training.resuming import (
    Killed,
    Undisturbed,
    facts,
    records,
    resumed_steps,
    train,
    until,
    weights,
)
from valence.api import build_run
from valence.config.schema import Best, EarlyStop
from valence.training.callbacks import Callback
from valence.training.track import AnomalyDetector, BestMetricTracker, Budget
from valence.training.trainer import Trainer


@dataclass
class NaNGradients(Callback):
    """Makes all gradients NaN after step ``first``."""

    first: int

    def on_start(self, run: Trainer) -> None:
        for p in run.state.trained_weights.values():
            p.register_hook(lambda grad: grad * torch.nan if run.step >= self.first else grad)


@dataclass
class OutOfMemory(Callback):
    """Raises an error in every phase of this name after this step, until less runs at once."""

    step: int
    phase: str
    error: Exception

    def on_start(self, run: Trainer) -> None:
        limit = run.state.objective.micro_batch_tokens

        def fail(*_: Any) -> None:
            if run.step == self.step and run.state.objective.micro_batch_tokens == limit:
                raise self.error

        if self.phase == "training":
            first, *_ = run.state.trained_weights.values()  # the last to get a gradient
            first.register_hook(fail)
        else:
            run.policy.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else fail())


def numbers(texts: list[str]) -> list[str]:
    """The first number of each text."""
    return [re.findall(r"\d+", text)[0] for text in texts]


def test_too_many_bad_steps_leave_a_checkpoint_from_before_them(
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    settings["train"]["max_skipped"] = 3
    with raises_error("loss-not-finite", where="step 8", fix="train.learning_rate"):
        train(settings, callbacks=[NaNGradients(5)])
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-2",
        "step-4",
        "step-5",
    ]
    warnings = facts(tmp_path / "run")["warnings"][:3]
    assert numbers(warnings) == ["6", "7", "8"]
    run, _ = train(settings)  # with the cause removed
    assert resumed_steps(tmp_path / "run") == [5]
    undisturbed.assert_same(run, tmp_path / "run")


def test_a_run_in_which_every_step_is_skipped_fails(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Also a run with fewer steps than train.max_skipped: it has trained nothing."""
    settings["train"] |= {"max_skipped": 100}
    with raises_error("loss-not-finite"):
        train(settings, callbacks=[NaNGradients(0)])
    assert facts(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run/model").exists()


def test_no_state_is_saved_amid_bad_steps(
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    """What would be saved after step 4, which was skipped, is the state after step 2."""
    with pytest.raises(Killed):
        train(settings, callbacks=[NaNGradients(2), until(4)])
    assert sum(row.get("skipped", 0) for row in records(tmp_path / "run")) > 0
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]


CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory.")
CPU_ERROR = RuntimeError(
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
)


@pytest.mark.parametrize(("phase", "error"), [
    ("training", CUDA_ERROR), ("evaluation", MemoryError()),
    pytest.param("training", CPU_ERROR, marks=pytest.mark.slow),
    pytest.param("evaluation", CUDA_ERROR, marks=pytest.mark.slow),
    pytest.param("training", MemoryError(), marks=pytest.mark.slow),
    pytest.param("evaluation", CPU_ERROR, marks=pytest.mark.slow),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)  # fmt: skip
def test_when_memory_runs_out_half_as_much_runs_at_once(
    phase: str,
    error: Exception,
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    settings["train"]["micro_batch_tokens"] = 200
    at = 2 if phase == "training" else 4
    run, _ = train(settings, callbacks=[OutOfMemory(at, phase, error)])
    assert facts(tmp_path / "run")["micro_batch_tokens"] == [
        [0, "evaluation", 200],
        [at, phase, 100],
    ]
    (warning,) = facts(tmp_path / "run")["warnings"]
    assert re.findall(r"\d+", warning) == [str(at), "100"]
    for name, p in weights(undisturbed.run).items():
        torch.testing.assert_close(weights(run)[name], p, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_step_from_which_the_smaller_number_holds(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit: the steps replayed before it run with the number that they had."""
    settings["train"]["micro_batch_tokens"] = 60
    undisturbed = {**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}}
    failure = OutOfMemory(5, "training", MemoryError())
    full, _ = train(undisturbed, callbacks=[failure])
    with pytest.raises(Killed):
        train(settings, callbacks=[failure, until(6)])
    again, _ = train(settings)
    assert (
        again.state.budget.state_dict()
        == full.state.budget.state_dict()
        == [[0, "evaluation", 60], [5, "training", 30]]
    )
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())


def test_memory_that_runs_out_again_ends_the_run_with_advice() -> None:
    budget = Budget(100)
    budget.halve(3, "training")
    places: list[Any] = [(0, "training"), (3, "evaluation"), (3, "training"), (9, "evaluation")]
    assert [budget.at(*place) for place in places] == [100, 100, 50, 50]
    with raises_error(
        "out-of-memory",
        where="train.micro_batch_tokens",
        fix="train.checkpointing",
    ) as raised:
        budget.halve(7, "evaluation")
    assert re.findall(r"\d+", raised.error.message) == ["7", "50"]


def test_the_best_is_the_first_best_and_a_number_that_is_not_finite_never_is() -> None:
    best = BestMetricTracker(Best(metric="eval/x", mode="max"))
    values = [9.0, 1.0, math.nan, 2.0, 2.0, math.inf, 1.5]
    better = [best.update(step, {"eval/x": value}) for step, value in enumerate(values)]
    assert better == [
        False,
        True,
        False,
        True,
        False,
        False,
        False,
    ]  # before the first step there is nothing to save
    assert (best.best, best.step) == (2.0, 3)
    early = BestMetricTracker(EarlyStop(metric="eval/x", min_delta=0.1, patience=2))
    for step, value in enumerate([1.0, 0.95, 0.85, 0.8, 0.79], start=1):
        assert not early.exhausted
        early.update(step, {"eval/x": value})
    assert early.step == 3
    assert re.findall(r"[\d.]+\b", early.exhausted) == ["3", "0.85", "2"]
    other = BestMetricTracker(EarlyStop(metric="eval/x"))
    other.load_state_dict(early.state_dict())
    assert (other.best, other.since) == (0.85, 2)
    changed = BestMetricTracker(EarlyStop(metric="eval/y"))
    changed.load_state_dict(early.state_dict())
    assert changed.best is None


def test_a_jump_of_the_loss_is_a_warning_and_noise_is_not() -> None:
    torch.manual_seed(0)
    watch = AnomalyDetector()
    noise = [0.7 + 0.02 * float(torch.randn(())) for _ in range(300)]
    assert [warning for value in noise for warning in watch.update({"loss": value})] == []
    assert watch.update({"loss": float("nan")}) == []
    (warning,) = watch.update({"loss": 3.0})
    assert re.findall(r"[\d.]+\b", warning)[:1] == ["3"]
    falling = AnomalyDetector()
    assert [
        warning for i in range(300) for warning in falling.update({"loss": 2.0 * 0.98**i})
    ] == []
    early = AnomalyDetector()
    assert [
        warning
        for value in (0.7, 0.7, 5.0)
        for warning in early.update(
            {"loss": value},
        )
    ] == []  # too few to know


def test_preferred_answers_that_become_unlikely_are_one_warning() -> None:
    watch = AnomalyDetector()
    falling = [-100.0, -120.0, -149.0, -151.0, -300.0]
    (warning,) = [
        warning
        for value in falling
        for warning in watch.update(
            {"eval/logps/chosen": value},
        )
    ]
    assert re.findall(r"-[\d.]+\b", warning) == ["-100", "-151"]
    assert AnomalyDetector().update({}) == []


def test_training_continues_with_a_full_disk_until_too_many_saves_failed(
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    settings["run"] |= {"save_every": 1, "max_failed_saves": 3, "keep": None}

    def fill(_: Trainer, record: Any) -> None:
        if record["step"] == 4:
            limit_file_size(20_000)  # the log is smaller, and the tensors of a state are larger

    run = build_run(settings, quiet=True, callbacks=[fill])
    where = str(tmp_path / "run/checkpoints")
    with full_disk(-1), raises_error("checkpoint-not-saved", where=where) as raised:
        run.fit()
    assert "step-3" in raised.error.message
    assert run.step == 6
    assert run.folder is not None
    run.folder.close()
    assert numbers(facts(tmp_path / "run")["warnings"]) == ["4", "5", "6"]
    again, _ = train(settings)
    assert resumed_steps(tmp_path / "run") == [3]
    undisturbed.assert_same(again, tmp_path / "run")
