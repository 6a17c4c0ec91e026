"""Paths in recipes and on the command line: the home folder, and names that no file system can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.command import command
from tests.training.test_run import folder, recipe
from valence.config.load import load_recipe
from valence.errors import UserError
from valence.training.folder import RunFolder
from valence.training.lines import Lines
from valence.training.methods import method_of

__all__ = ["folder"]

LONG = "x" * 300
BAD = {"nul": "a\0b", "long name": LONG, "long path": "x/" * 2500 + "x", "half a character": "a\ud800b"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_run_is_in_the_home_folder_where_its_recipe_says_so(folder: Path, tmp_path: Path, home: Path) -> None:
    settings = recipe(folder, tmp_path, run={"dir": "~/runs/first"}, train={"max_steps": 1})
    valence.train(settings, quiet=True)
    assert (home / "runs/first/model").is_dir()
    assert not (tmp_path / "~").exists()
    assert command("resume", str(home / "runs/first")) == 0


def test_every_path_of_a_recipe_may_begin_with_the_home_folder(home: Path) -> None:
    given = {
        "method": "grpo",
        "model": {"name": "~/m", "adapter": "~/a", "tokenizer": "~/t"},
        "reference": {"model": "~/r", "cache": "~/c"},
        "reward": [{"reward": "~/rm"}],
        "rollout": {"folder": "~/w", "python": "~/p"},
        "data": {"train": "~/d.jsonl"},
        "run": {"dir": "~/o", "sinks": [{"kind": "tensorboard", "folder": "~/s"}]},
    }
    (home / "d.jsonl").write_text("")
    settings = load_recipe(given, method_of=method_of, training=False).settings
    named = {name: setting.value for name, setting in settings.items() if str(setting.value).startswith(str(home))}
    assert sorted(Path(str(path)).name for path in named.values()) == sorted(
        ["m", "a", "t", "r", "c", "rm", "w", "p", "d.jsonl", "o", "s"]
    )


def test_a_home_folder_that_is_not_there_is_an_error() -> None:
    given = {"method": "kto", "model": {"name": "m"}, "run": {"dir": "~nobody-of-this-name/run"}}
    with pytest.raises(UserError, match="no home folder for ~nobody-of-this-name") as error:
        load_recipe(given, method_of=method_of, training=False)
    assert "run.dir" in str(error.value)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("setting", ["run.dir", "model.name", "reference.cache", "rollout.folder", "data.eval.0.path"])
def test_a_path_that_no_file_system_can_hold_names_its_setting(bad: str, setting: str) -> None:
    given: dict[str, Any] = {"method": "kto", "model": {"name": "m"}}
    section, name = setting.split(".")[0], setting.split(".")[1]
    given[section] = {**given.get(section, {}), name: [{"path": bad}] if section == "data" else bad}
    with pytest.raises(UserError) as error:
        load_recipe(given, method_of=method_of, training=False)
    assert setting in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_objects_that_write_refuse_such_a_path(bad: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        RunFolder(tmp_path / bad)
    with pytest.raises(UserError):
        Lines(tmp_path / f"{bad}.jsonl", 1)


@pytest.fixture
def run(folder: Path, tmp_path: Path, home: Path) -> Path:
    valence.train(recipe(folder, tmp_path, train={"max_steps": 1}), quiet=True)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(folder, tmp_path)))
    return tmp_path / "run"


@pytest.mark.parametrize("words", [
    ["train", "recipe.yaml", f"run.dir={LONG}"],
    ["train", "recipe.yaml", 'run.dir="a\\0b"'],
    ["train", LONG],
    ["check", "recipe.yaml", f"run.dir={LONG}"],
    ["resume", LONG],
    ["runs", LONG],
    ["export", "run", LONG],
    ["export", "run", f"{LONG}/out"],
    ["export", LONG, "out"],
    ["evaluate", "run", "--out", LONG],
    ["evaluate", LONG],
    ["evaluate", "run", "--data", LONG],
    ["sample", "run", "--prompt", "a", "--max-new-tokens", "1", "--out", f"{LONG}.jsonl"],
    ["sample", LONG, "--prompt", "a"],
    ["sample", "run", "--data", '{path: "a\\0b"}', "--out", "out.jsonl"],
    ["score", "run", "--data", "train.jsonl", "--out", f"{LONG}.jsonl"],
    ["score", "recipe.yaml", f"reference.cache={LONG}"],
    ["report", "run", "--out", LONG],
    ["report", "run", "--md", "--out", f"{LONG}/x.md"],
    ["report", LONG],
    ["inspect", LONG],
], ids=lambda words: " ".join(word[:20] for word in words))  # fmt: skip
def test_no_command_ends_with_a_traceback_for_such_a_path(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*words) == 2
    said = capsys.readouterr().err
    assert said.count("valence: ") == 1
    assert len(said) < 1000


def test_doctor_names_such_a_path_in_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("doctor", LONG, "--json") == 2
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["about"], row["state"]) for row in rows if row["state"] == "problem"] == [("recipe", "problem")]
