"""What goes wrong while a run trains: bad steps, jumps, memory that runs out, disks that are full."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.resuming import killed, records, settings, train, weights  # noqa: F401  (a fixture)
from tests.training.test_run import folder  # noqa: F401  (a fixture)
from valence.api import build_run
from valence.config.schema import Best, EarlyStop
from valence.errors import UserError
from valence.training.loop import Run
from valence.training.step import Objective
from valence.training.track import Budget, Selection, Watch


def broken_from(step: int, monkeypatch: pytest.MonkeyPatch, until: int = 10**9) -> None:
    """Steps after this one have a gradient that is not finite."""
    whole = Objective.run

    def run(self: Objective, *args: Any, backward: bool, **how: Any) -> Any:
        found = whole(self, *args, backward=backward, **how)
        if backward and step <= current[0].step < until:
            for p in self.policy.parameters():
                if p.grad is not None:
                    p.grad.fill_(float("nan"))
        return found

    current: list[Run] = []
    init = Run._one_step

    def noted(self: Run) -> Any:
        current[:] = [self]
        return init(self)

    monkeypatch.setattr(Run, "_one_step", noted)
    monkeypatch.setattr(Objective, "run", run)


def test_too_many_bad_steps_leave_a_checkpoint_from_before_them(
    settings: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings["train"]["max_skipped"] = 3
    settings["run"]["dir"] = str(tmp_path / "whole")
    whole, _ = train(settings)
    settings["run"]["dir"] = str(tmp_path / "run")
    with monkeypatch.context() as patch:
        broken_from(5, patch)
        with pytest.raises(UserError, match="3 steps in a row"):
            train(settings)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-2", "step-4", "step-5"]
    warnings = json.loads((tmp_path / "run/run.json").read_text())["warnings"]
    assert [said.split(" was skipped")[0] for said in warnings[:3]] == ["step 6", "step 7", "step 8"]
    again, said = train(settings)  # what was wrong is mended: it goes on as if nothing had been
    assert "after step 5 of 9" in said
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())


def test_no_state_is_saved_amid_bad_steps(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Steps 3 and 4 are skipped; what would be saved after step 4 is the state after step 2."""
    broken_from(2, monkeypatch, until=4)
    run, _ = train(settings)
    assert run.step == 9
    skipped = [row["skipped"] for row in records(tmp_path / "run") if row["step"]]
    assert sum(skipped) > 0
    killed({**settings, "run": {**settings["run"], "dir": str(tmp_path / "other")}}, 4)
    assert [path.name for path in (tmp_path / "other/checkpoints").iterdir()] == ["step-2"]


@pytest.mark.parametrize("phase", ["training", "evaluation"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)], ids=lambda e: type(e).__name__)  # fmt: skip
def test_when_memory_runs_out_half_as_much_runs_at_once(
    phase: str,
    error: Exception,
    settings: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings["train"]["micro_batch_tokens"] = 200
    settings["model"]["lora"]["dropout"] = 0.0
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    run_once, seen = Objective.run, []

    def scarce(self: Objective, *args: Any, backward: bool, **how: Any) -> Any:
        found = run_once(self, *args, backward=backward, **how)
        if self.budget > 100 and backward is (phase == "training") and len(seen) < 3:
            seen.append(1)
            if len(seen) == 3:
                raise error
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "run", scarce)
        run, said = train(settings)
    at = 2 if phase == "training" else 4
    assert f"out of memory in step {at} ({phase}): from here on 100 tokens run at once" in said
    assert json.loads((tmp_path / "run/run.json").read_text())["micro_batch_tokens"] == [[0, "evaluation", 200], [at, phase, 100]]
    for name, p in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], p, rtol=1e-4, atol=1e-6)


def test_the_smaller_number_holds_from_the_same_step_on_when_a_run_is_taken_up(
    settings: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: the steps replayed before it run with the number that they had."""
    settings["train"]["micro_batch_tokens"] = 60
    run_once = Objective.run

    def scarce(at: int) -> Any:
        def run(self: Objective, *args: Any, backward: bool, **how: Any) -> Any:
            if backward and current[0].step == at and self.budget > 30:
                raise MemoryError
            return run_once(self, *args, backward=backward, **how)

        return run

    current: list[Run] = []
    monkeypatch.setattr(Run, "_update", lambda self, _of=Run._update: (current.__setitem__(slice(None), [self]), _of(self))[1])
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "run", scarce(5))
        whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
        killed(settings, 6)
    again, _ = train(settings)
    assert again.budget.state_dict() == whole.budget.state_dict() == [[0, "evaluation", 60], [5, "training", 30]]
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())


def test_memory_that_runs_out_again_ends_the_run_with_advice() -> None:
    budget = Budget(100)
    budget.halve(3, "training")
    assert [budget.at(*where) for where in ((0, "training"), (3, "evaluation"), (3, "training"), (9, "evaluation"))] == [
        100, 100, 50, 50,
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"also with 50 tokens at once\n.*train\.checkpointing"):
        budget.halve(7, "evaluation")


def test_the_best_is_the_first_best_and_no_number_is_none() -> None:
    best = Selection(Best(metric="eval/x", mode="max"))
    seen = [best.see(step, {"eval/x": value}) for step, value in enumerate([9.0, 1.0, math.nan, 2.0, 2.0, math.inf, 1.5])]
    assert seen == [False, True, False, True, False, False, False]  # before the first step there is nothing to save
    assert (best.best, best.step) == (2.0, 3)
    early = Selection(EarlyStop(metric="eval/x", min_delta=0.1, patience=2))
    for step, value in enumerate([1.0, 0.95, 0.85, 0.8, 0.79], start=1):
        assert not early.exhausted
        early.see(step, {"eval/x": value})
    assert early.step == 3
    assert "best at step 3 (0.85), and 2 evaluations" in early.exhausted
    other = Selection(EarlyStop(metric="eval/x"))
    other.load_state_dict(early.state_dict())
    assert (other.best, other.since) == (0.85, 2)
    changed = Selection(EarlyStop(metric="eval/y"))
    changed.load_state_dict(early.state_dict())
    assert changed.best is None


def test_a_jump_of_the_loss_is_told_and_noise_is_not() -> None:
    torch.manual_seed(0)
    watch = Watch()
    noise = [0.7 + 0.02 * float(torch.randn(())) for _ in range(300)]
    assert [said for value in noise for said in watch.see({"loss": value})] == []
    assert watch.see({"loss": float("nan")}) == []
    (said,) = watch.see({"loss": 3.0})
    assert "jumped to 3" in said
    falling = Watch()
    assert [said for i in range(300) for said in falling.see({"loss": 2.0 * 0.98**i})] == []
    early = Watch()
    assert [said for value in (0.7, 0.7, 5.0) for said in early.see({"loss": value})] == []  # too few to know


def test_preferred_answers_that_become_unlikely_are_told_once() -> None:
    watch = Watch()
    falls = [-100.0, -120.0, -149.0, -151.0, -300.0]
    said = [line for value in falls for line in watch.see({"eval/logps/chosen": value})]
    assert len(said) == 1
    assert "from -100 to -151" in said[0]
    assert Watch().see({}) == []


def test_a_full_disk_is_told_and_training_goes_on_until_it_was_so_too_often(
    settings: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings["run"] |= {"save_every": 1, "max_failed_saves": 3, "keep": None}
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = build_run(settings, quiet=True, callbacks=[
        lambda run, record: monkeypatch.setattr("valence.checkpoint.store.save_file", full) if record["step"] == 4 else None,
    ])  # fmt: skip
    with pytest.raises(UserError, match=r"3 in a row failed; the last good one is step-3\)"):
        run.fit()
    assert run.step == 6
    assert run.folder is not None
    run.folder.close()
    monkeypatch.undo()
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert [line.split(" was not saved")[0] for line in facts["warnings"]] == [f"checkpoint step-{n}" for n in (4, 5, 6)]
    again, said = train(settings)
    assert "after step 3 of 9" in said
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())
