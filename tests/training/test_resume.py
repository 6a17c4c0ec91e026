"""The same command again: what goes on, what is refused, and what may have changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import valence
from tests.models import tiny
from tests.programs import Program
from tests.tiny import tiny_tokenizer
from tests.training.test_run import ROWS, folder, logged, recipe, written  # noqa: F401  (a fixture)
from valence.api import build_run
from valence.errors import UserError
from valence.report.metrics import repeatable
from valence.training import finish, measure
from valence.training.loop import Run
from valence.training.restore import restore
from valence.training.signals import Interrupted


class Killed(BaseException):
    """Ends a run as kill -9 would: nothing is saved on the way out."""


def until(step: int) -> Any:
    """A callback that kills after the record of this step."""

    def kill(run: Run, record: Any) -> None:
        if record["step"] == step:
            run.whole = False  # no state is saved any more
            raise Killed

    return kill


def train(settings: dict[str, Any], **more: Any) -> tuple[Run, str]:
    """Trains, and what was said."""
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    try:
        return valence.train(settings, console=console, **more), console.export_text()
    except (Killed, KeyboardInterrupt, UserError) as error:
        error.add_note(console.export_text())
        raise


def killed(settings: dict[str, Any], step: int, **more: Any) -> None:
    with pytest.raises(Killed):
        train(settings, callbacks=[until(step)], quiet=True, **more)


def records(path: Path) -> list[dict[str, Any]]:
    return [repeatable(row) for row in logged(path)]


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    """Twelve thumbs in steps of four, three times; a checkpoint after every second step."""
    found = recipe(folder, tmp_path, model={"lora": {"rank": 2}}, train={"epochs": 3})
    found["run"] |= {"save_every": 2, "log_every": 3}
    return found


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in run.trained.items()}


@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_killed_run_ends_as_one_that_was_not(step: int, settings: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    killed(settings, step)
    again, said = train(settings)
    assert re.search(rf"taking up the run in .* after step {(step - 1) // 2 * 2} of 9", said)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_resumed_again_and_again_also_where_an_epoch_ends(settings: dict[str, Any], tmp_path: Path) -> None:
    """Epochs have three steps: the second start goes on from step 2, the third from step 6, the last from 8."""
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    for step in (4, 8, 9):
        killed(settings, step)
    again, said = train(settings)
    assert "after step 8 of 9" in said
    assert (again.tokens_seen, again.counters.examples_seen) == (whole.tokens_seen, 36)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_no_number_is_read_from_a_path(settings: dict[str, Any], tmp_path: Path) -> None:
    """Neither from folders above the run's, nor from the name of a checkpoint."""
    settings["run"]["dir"] = str(tmp_path / "step-70/step=9/epoch=3/run")
    killed(settings, 6)
    checkpoints = tmp_path / "step-70/step=9/epoch=3/run/checkpoints"
    (checkpoints / "step-4").rename(checkpoints / "step-8")
    again, said = train(settings)
    assert "this checkpoint is damaged: it is of step 4" in said
    assert "after step 2 of 9" in said
    assert again.step == 9


def test_without_a_checkpoint_it_begins_again_with_the_same_choices(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["run"]["save_every"] = 100
    killed(settings, 3)
    assert not (tmp_path / "run/checkpoints").exists()
    before = records(tmp_path / "run")
    monkeypatch.setattr("valence.training.plan.free_memory", lambda _: 1)
    again, said = train(settings)
    assert "no checkpoint yet" in said
    assert again.budget.at(0, "training") == json.loads((tmp_path / "run/run.json").read_text())["micro_batch_tokens"][0][2] > 512
    assert records(tmp_path / "run")[: len(before)] == before
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 2, 3, 4, 6, 8, 9]


def test_nothing_is_done_about_a_finished_run(settings: dict[str, Any], tmp_path: Path) -> None:
    done, _ = train(settings)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != "run.lock"}
    again, said = train(settings)
    assert "is finished (9 steps" in said
    assert "there is nothing to do" in said
    assert again.step == 9
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(done).items())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != "run.lock"} == files


@pytest.mark.parametrize(("section", "change", "said"), [
    ("train", {"learning_rate": 2e-3}, r"train\.learning_rate: 0\.001 -> 0\.002"),
    ("train", {"epochs": 1}, r"train\.epochs: 3\.?0? -> 1"),
    ("train", {"max_steps": 5}, r"train\.max_steps: null -> 5"),
    ("train", {"seed": 1}, r"train\.seed: 0 -> 1"),
    ("model", {"lora": {"rank": 4}}, r"model\.lora\.rank: 2 -> 4"),
    ("model", {"lora": None}, r"model\.lora"),
    ("loss", {"beta": 0.2}, r"loss\.beta: 0\.1 -> 0\.2"),
    ("eval", {"every": 3}, r"eval\.every: 2\.?0? -> 3"),
])  # fmt: skip
def test_a_changed_setting_is_refused_with_the_difference(
    section: str, change: dict[str, Any], said: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    killed(settings, 4)
    log = (tmp_path / "run/metrics.jsonl").read_bytes()
    settings[section] = {**settings.get(section, {}), **change}
    with pytest.raises(UserError, match=said) as error:
        train(settings)
    assert "--fresh" in str(error.value)
    assert "--allow" in str(error.value)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == log


def test_what_is_allowed_by_name_takes_effect_from_there_on(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["train"] |= {"schedule": "constant", "warmup": 0}
    killed(settings, 6)
    settings["train"]["learning_rate"] = 5e-4
    with pytest.raises(UserError, match="learning_rate"):
        train(settings, allow=["train.warmup", "data"])
    _, said = train(settings, allow=["train.learning_rate"])
    assert "with train.learning_rate: 0.001 -> 0.0005" in said
    assert [row["lr"] for row in records(tmp_path / "run") if row["step"]] == [1e-3] * 3 + [5e-4] * 3
    (entry,) = json.loads((tmp_path / "run/run.json").read_text())["taken_up"]
    assert (entry["step"], entry["with"]) == (4, ["train.learning_rate: 0.001 -> 0.0005"])


@pytest.mark.parametrize("change", [
    {"train": {"epochs": 4}}, {"train": {"epochs": 9, "max_steps": 12}},
    {"run": {"keep": 1, "save_every": 5, "max_time": "01:00:00", "max_failed_saves": 9, "save_hf": True}},
], ids=str)  # fmt: skip
def test_a_run_may_get_longer_and_be_saved_otherwise(change: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    if "max_steps" in change.get("train", {}):
        settings["train"]["max_steps"] = 9
    train(settings) if "train" in change else killed(settings, 4)
    for section, values in change.items():
        settings[section] = {**settings[section], **values}
    again, _ = train(settings)
    assert again.step == (12 if "train" in change else 9)
    steps = [row["step"] for row in records(tmp_path / "run")]
    assert steps == sorted(set(steps))
    assert steps[-1] == again.step


def test_a_longer_run_has_the_learning_rates_of_its_new_length(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["log_every"] = 1
    settings["train"]["warmup"] = 0
    settings["train"]["max_steps"] = 5
    train(settings)
    settings["train"]["max_steps"] = 9
    train(settings)
    rates = {row["step"]: row["lr"] for row in records(tmp_path / "run")[1:]}
    assert rates[5] == pytest.approx(1e-3 * (1 - 4 / 5))
    assert [rates[step] for step in (6, 9)] == pytest.approx([1e-3 * (1 - 5 / 9), 1e-3 * (1 - 8 / 9)])


def test_changed_rows_are_refused_with_the_difference(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 4)
    rows = [*ROWS[1:], {**ROWS[0], "completion": "another one"}, {**ROWS[0], "completion": "and one more"}]
    written(tmp_path / "train.jsonl", rows)
    said = r"data\.train: 12 rows then, 13 now: 2 are new, the first of them .*train\.jsonl:12, 1 are gone"
    with pytest.raises(UserError, match=said):
        train(settings)


def test_rows_in_another_order_are_the_same_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    killed(settings, 4)
    written(tmp_path / "train.jsonl", ROWS[::-1])
    again, _ = train(settings)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())


def test_none_of_the_new_rows_is_skipped(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(settings, 6)
    rows = [{**row, "completion": f"new {i} {i}"} for i, row in enumerate(ROWS)]
    written(tmp_path / "train.jsonl", rows)
    seen: list[str] = []
    step = Run._update

    def spied(run: Run) -> Any:
        assert run.sampler is not None
        ours, _ = run.sampler.step(run.step - run.counters.first)
        seen.extend(run.sampler.units[i].id for i in ours)
        return step(run)

    monkeypatch.setattr(Run, "_update", spied)
    again, said = train(settings, allow=["data.train"])
    assert "all of the rows are trained on from step 4 on" in said
    assert (again.step, again.counters.first) == (13, 4)
    assert len(seen) == 36
    assert len(set(seen)) == 12
    assert all(seen.count(name) == 3 for name in seen)


def test_another_model_in_the_same_place_is_noticed(folder: Path, settings: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    """Under an adapter the frozen weights, else what the policy is compared with."""
    for lora in ({"rank": 2}, None):
        place = tmp_path / f"model{bool(lora)}"
        tiny_tokenizer().save_pretrained(place)
        tiny(vocab_size=len(tiny_tokenizer()), dtype=torch.float32).save_pretrained(place)
        run = {**settings["run"], "dir": str(tmp_path / f"run{bool(lora)}")}
        mine = {**settings, "model": {"name": str(place), "lora": lora}, "run": run}
        killed(mine, 4)
        tiny(vocab_size=len(tiny_tokenizer()), dtype=torch.float32, seed=5).save_pretrained(place)
        with pytest.raises(
            UserError, match="frozen weights under the adapter have changed|is another model than the run began with"
        ):
            train(mine)


def test_a_run_that_was_stopped_behind_its_last_step_says_what_is_left(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run, *_: Any) -> None:
        run.stop._ask("SIGTERM", 143)
        raise run.stop.ended()

    with monkeypatch.context() as patch:
        patch.setattr(finish, "_tell_of_the_end", stopped)
        with pytest.raises(Interrupted):
            train(settings)
    _, said = train(settings)
    assert "after step 9 of 9: what comes after the last step is left, such as evaluation and model" in " ".join(said.split())


def test_a_signal_in_an_evaluation_leaves_it_to_the_next_start(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    unstopped = measure._measure

    def stopped(run: Run, *args: Any) -> Any:
        if run.step == 4:
            run.stop._ask("SIGTERM", 143)
        return unstopped(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "_measure", stopped)
        with pytest.raises(Interrupted, match="SIGTERM: stopped after step 4 of 9") as error:
            train(settings)
    assert error.value.status == 143
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 2, 3]
    again, _ = train(settings)
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())


def test_the_best_checkpoint_stays_and_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"] |= {"save_every": 1, "keep": 1, "keep_best": {"metric": "eval/rewards/margins", "mode": "min"}}
    train(settings)
    margins = {
        row["step"]: row["eval/rewards/margins"] for row in records(tmp_path / "run") if "eval/loss" in row and row["step"]
    }
    best = min(margins, key=lambda step: margins[step])
    assert best != 9
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == sorted([f"step-{best}", "step-9"])
    run = restore(tmp_path / "run", at="best", quiet=True)
    assert run.step == best
    assert run.evaluate().metrics["rewards/margins"] == pytest.approx(margins[best], rel=1e-4)
    with pytest.raises(UserError, match=rf"no checkpoint of step 5\n.*name one of {best}, 9"):
        restore(tmp_path / "run", at=5, quiet=True)


def test_a_run_that_no_longer_gets_better_ends_early_and_as_done(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["early_stop"] = {"metric": "eval/loss", "mode": "max", "patience": 2, "min_delta": 100.0}
    killed(settings, 4)
    run, said = train(settings)
    assert run.step == 6  # the best is the first, at 2; those at 4 and 6 are no better
    assert "ended at step 6 of 9" in said
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert facts["status"] == "done"
    assert "eval/loss was best at step 2" in facts["ended_early"]
    assert (tmp_path / "run/model").is_dir()
    _, said = train(settings)
    assert "it ended early" in said


def test_a_number_that_no_evaluation_has_is_named_at_the_first_one(settings: dict[str, Any]) -> None:
    settings["run"]["keep_best"] = {"metric": "eval/los"}
    with pytest.raises(UserError, match=r"no eval/los.*\n.*eval/loss"):
        train(settings)


def test_models_alone_may_be_saved_and_are_not_gone_on_with(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings["run"] |= {"save_state": False, "save_hf": True}
    killed(settings, 6)
    (saved, *_) = sorted((tmp_path / "run/checkpoints").iterdir())
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "model"]
    assert AutoModelForCausalLM.from_pretrained(saved / "model")
    with pytest.raises(UserError, match=r"no state to go on from.*\n.*--fresh"):
        train(settings)
    train(settings, fresh=True)
    _, said = train(settings)
    assert "is finished" in said
    with pytest.raises(UserError, match="holds no state"):
        restore(tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("given", "why"), [
    ({"max_time": "90"}, "01:30:00"), ({"max_time": "00:00:00"}, "01:30:00"), ({"max_time": "1:75:00"}, "01:30:00"),
    ({"save_state": False}, "run.save_hf"), ({"keep_best": {"metric": "loss"}}, "eval/"), ({"keep": 0}, "keep"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], why: str, settings: dict[str, Any]) -> None:
    settings["run"] |= given
    with pytest.raises(UserError, match=re.escape(why)):
        train(settings)


def test_two_runs_are_not_in_one_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    run = build_run(settings, quiet=True)
    recipe, said = tmp_path / "recipe.yaml", tmp_path / "said"
    recipe.write_text(json.dumps(settings))
    assert Program("train", str(recipe), said=said).wait() == 2
    assert "another run is using this folder: pid" in said.read_text()
    assert run.folder is not None
    run.folder.close()


def test_steps_of_another_size_go_on_where_the_data_was(settings: dict[str, Any], tmp_path: Path) -> None:
    """Twelve rows, three epochs: after four steps of four rows, four thirds of an epoch are done; then steps of two."""
    killed(settings, 6)
    settings["train"]["batch_size"] = 2
    run, _ = train(settings, allow=["train.batch_size"])
    assert run.counters.first == 4 - 8
    assert run.step == run.total_steps == 4 + 10  # of 18 steps of two rows, 8 were behind it
    assert run.counters.examples_seen == 36
    assert records(tmp_path / "run")[-1]["epoch"] == 3


def test_fewer_steps_than_were_done_are_refused(settings: dict[str, Any]) -> None:
    killed(settings, 9)
    settings["train"]["epochs"] = 1
    with pytest.raises(UserError, match="has done 8 steps, more than the 3"):
        train(settings, allow=["train.epochs"])


def test_a_start_that_fails_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 6)
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "rows.safetensors")}
    wider = {**settings, "model": {**settings["model"], "lora": {"rank": 4}}}
    with pytest.raises(UserError, match="another model"):
        train(wider, allow=["model"])
    assert {name: (tmp_path / "run" / name).read_bytes() for name in kept} == kept
    assert train(settings)[0].step == 9
    assert len(json.loads((tmp_path / "run/run.json").read_text())["taken_up"]) == 1


def test_a_run_that_ended_early_goes_on_when_it_is_made_longer(settings: dict[str, Any]) -> None:
    settings["run"]["early_stop"] = {"metric": "eval/loss", "mode": "max", "patience": 2, "min_delta": 100.0}
    assert train(settings)[0].step == 6
    settings["train"]["epochs"] = 4
    run, said = train(settings)
    assert "12 steps instead of 9" in said
    assert run.step == 10  # two more evaluations that were no better


def test_a_name_to_allow_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    killed(settings, 6)
    with pytest.raises(UserError, match=r"there is no setting learning_rat\n.*train\.learning_rate"):
        train(settings, allow=["learning_rat"])


def test_rows_that_are_no_longer_there_are_noticed(settings: dict[str, Any]) -> None:
    killed(settings, 6)
    del settings["data"]["eval"], settings["eval"]
    with pytest.raises(UserError, match=r"data\.eval: 5 rows then, none now"):
        train(settings)


def test_the_same_rows_elsewhere_are_the_same_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 6)
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    settings["data"]["train"] = [{"path": str(tmp_path / "moved.jsonl")}]
    assert train(settings)[0].step == 9


def test_held_out_rows_in_another_order_are_others(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of which eval.max_examples takes the first."""
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[:5][::-1])
    with pytest.raises(UserError, match="the same ones in another order"):
        train(settings)


def test_the_best_of_other_rows_is_forgotten(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["keep_best"] = {"metric": "eval/loss", "mode": "max"}
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[5:9])
    run, said = train(settings, allow=["data.eval"])
    assert "the best so far is forgotten" in said
    assert run.best.step is not None
    assert run.best.step > 4


def test_links_are_not_written_through(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 6)
    precious = tmp_path / "precious"
    for name in ("run.lock", "metrics.jsonl"):
        precious.write_bytes(b"x" * 10**5)
        kept = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).symlink_to(precious)
        with pytest.raises(UserError, match=name):
            train(settings)
        assert precious.read_bytes() == b"x" * 10**5
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).write_bytes(kept)
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link to another folder"):
        train(settings)


def test_a_run_that_began_meanwhile_is_not_moved_away(settings: dict[str, Any], tmp_path: Path) -> None:
    """Two starts look at a folder that is not there yet; the second comes to claim it when the first has trained."""
    from valence.training.folder import RunFolder

    late = RunFolder(tmp_path / "run")
    killed(settings, 6)
    with pytest.raises(UserError, match="trained here meanwhile"):
        late.claim()
    assert (tmp_path / "run/checkpoints").is_dir()
    late.close()


def test_a_model_object_that_was_trained_is_not_begun_with_again(settings: dict[str, Any]) -> None:
    settings["run"]["save_every"] = 100
    del settings["model"]["lora"]
    model = tiny(vocab_size=len(tiny_tokenizer()), dtype=torch.float32)
    killed(settings, 4, model=model)
    with pytest.raises(UserError, match="not as it was when this run began"):
        train(settings, model=model)
    again = tiny(vocab_size=len(tiny_tokenizer()), dtype=torch.float32)
    assert train(settings, model=again)[0].step == 9


def test_another_optimizer_is_refused_in_words(settings: dict[str, Any]) -> None:
    killed(settings, 6, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    with pytest.raises(UserError, match="another optimizer or schedule"):
        train(settings)


def test_time_that_is_too_short_for_anything_is_no_reason_to_start_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from valence.training.signals import Stop

    killed(settings, 6)
    settings["run"]["max_time"] = "00:00:01"
    monkeypatch.setattr(Stop, "limit", lambda self, _: setattr(self, "_ends_at", 0.0))
    with pytest.raises(UserError, match="nothing was done within run.max_time"):
        train(settings)


def test_answers_to_prompts_that_are_gone_are_told_of(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["samples"] = {"prompts": 3, "max_new_tokens": 2}
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[2:7])
    _, said = train(settings, allow=["data.eval"])
    assert "2 of 3 prompts that were answered before training are gone" in said
    (kept,) = json.loads((tmp_path / "run/samples.json").read_text())
    assert kept["prompt"] == "question 2"
    assert {"before", "after"} <= kept.keys()
