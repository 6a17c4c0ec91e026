"""However a run ends, the trained weights are saved, and messages and files are correct."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.test_run import FinishedRuns, recipe, without_weights
from valence.training.open_run import restore
from valence.training.trainer import Trainer


def status(path: Path) -> str:
    return json.loads((path / "run/run.json").read_text())["status"]


def saved(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "run/checkpoints").glob("*"))


def test_an_export_that_fails_is_no_success_and_loses_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(torch.nn.Module, "save_pretrained", None, raising=False)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with raises_error("file-not-writable", where="run/model"):
        valence.train(recipe(folder, tmp_path), quiet=True)
    assert status(tmp_path) == "failed"
    assert saved(tmp_path) == ["step-6"]
    assert [p.name for p in (tmp_path / "run").iterdir() if "part" in p.name] == []


def test_a_run_that_ends_in_steps_that_are_not_finite_writes_no_model(
    folder: Path,
    tmp_path: Path,
) -> None:
    settings = recipe(folder, tmp_path, train={"learning_rate": 1e38, "epochs": 1})
    with raises_error("weights-not-finite", where="step 3", fix="train.learning_rate"):
        valence.train(settings, quiet=True)
    assert status(tmp_path) == "failed"
    assert not (tmp_path / "run/model").exists()


def test_a_run_does_not_write_where_other_files_are(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "work/model")
    for place in ("work", "work/model"):
        settings = recipe(tmp_path / "work/model", tmp_path, run={"dir": str(tmp_path / place)})
        with raises_error("data-in-run-folder", where="model.name", fix="run.dir"):
            valence.train(settings, quiet=True, fresh=True)
    assert sorted(p.name for p in (tmp_path / "work").iterdir()) == ["model"]


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_free(
    folder: Path,
    tmp_path: Path,
) -> None:
    broken = without_weights(folder, tmp_path / "broken")
    with raises_error("model-not-loadable"):
        valence.train(recipe(broken, tmp_path, train={"epochs": 1}), quiet=True)
    valence.train(recipe(folder, tmp_path, train={"epochs": 1}), quiet=True)
    assert status(tmp_path) == "done"


def test_an_adapter_is_not_put_on_other_weights(finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished("kto", True).directory
    other = tmp_path / "other"
    tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32, seed=8).save_pretrained(
        other
    )
    tiny_tokenizer().save_pretrained(other)
    with raises_error("base-model-changed", where="checkpoint"):
        restore(run, overrides=[f"model.name={other}"])
    with raises_error("model-changed", where="checkpoint"):
        restore(run, overrides=["model.lora.rank=2"])


def test_the_card_of_a_stopped_run_states_it(
    folder: Path,
    tmp_path: Path,
) -> None:
    def stop(run: Trainer, record: Any) -> None:
        if record["step"] == run.total_steps:
            raise KeyboardInterrupt

    words = "valence train mine.yaml"
    with pytest.raises(KeyboardInterrupt):
        valence.train(recipe(folder, tmp_path), quiet=True, command=words, callbacks=[stop])
    run = restore(tmp_path / "run", overrides=["data.train=[]"])
    run.model_writer.write(tmp_path / "out", "merged")
    card = (tmp_path / "out/README.md").read_text()
    assert words in card
    assert "train.jsonl" in card
    assert re.search(r"\bstopped\b.*\b6\b", card)


@pytest.mark.parametrize(("where", "remaining"), [("forward", ["step-2"]), ("update", [])])
def test_a_state_is_saved_unless_the_weights_were_changing(
    where: str,
    remaining: list[str],
    folder: Path,
    tmp_path: Path,
) -> None:
    """Interrupted before the update, the state is that of the last step; during the update, that of
    no step.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    class Interrupting(valence.Callback):
        def on_step(self, run: Trainer) -> None:
            if run.step == 2 and where == "forward":
                run.policy.register_forward_pre_hook(interrupt)
            elif run.step == 2:
                run.state.optimizer.register_step_post_hook(interrupt)

    settings = recipe(folder, tmp_path)
    del settings["data"]["eval"], settings["eval"]
    with pytest.raises(KeyboardInterrupt):
        valence.train(settings, quiet=True, callbacks=[Interrupting()])
    assert saved(tmp_path) == remaining
    assert status(tmp_path) == "interrupted"
