"""Paths in recipes and on the command line: the home folder, and names that no file system can
hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.command import command, command_error, place, write_place
from tests.errors import check_error, raises_error
from valence.config.load import load_recipe
from valence.jobs.row_job import OutputFile
from valence.training.folder import RunFolder

__all__ = ["place"]

LONG = "x" * 300
BAD = {
    "nul": ("a\0b", "path-invalid"),
    "long name": (LONG, "path-too-long"),
    "long path": ("x/" * 2500 + "x", "path-too-long"),
    "half a character": ("a\ud800b", "path-invalid"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_run_is_in_the_home_folder_where_its_recipe_says_so(place: Path, home: Path) -> None:
    overrides = ["run.dir=~/runs/first", "train.max_steps=1"]
    valence.train("recipe.yaml", overrides=overrides, quiet=True)
    assert (home / "runs/first/model").is_dir()
    assert not (place / "~").exists()
    assert command("train", str(home / "runs/first")) == 0


def test_every_path_of_a_recipe_may_begin_with_the_home_folder(home: Path) -> None:
    inputs = {
        "method": "grpo",
        "model": {"name": "~/m", "adapter": "~/a", "tokenizer": "~/t"},
        "reference": {"model": "~/r", "cache": "~/c"},
        "reward": [{"reward": "~/rm"}],
        "rollout": {"folder": "~/w", "python": "~/p"},
        "data": {"train": "~/d.jsonl"},
        "run": {"dir": "~/o", "sinks": [{"kind": "tensorboard", "folder": "~/s"}]},
    }
    (home / "d.jsonl").write_text("")
    settings = load_recipe(inputs, training=False).settings
    named = {
        name: setting.value
        for name, setting in settings.items()
        if str(setting.value).startswith(str(home))
    }
    assert sorted(Path(str(path)).name for path in named.values()) == sorted(
        ["m", "a", "t", "r", "c", "rm", "w", "p", "d.jsonl", "o", "s"]
    )


def test_a_home_folder_that_is_not_there_is_an_error() -> None:
    settings = {"method": "kto", "model": {"name": "m"}, "run": {"dir": "~nobody-of-this-name/run"}}
    with raises_error("path-no-home", where="run.dir") as raised:
        load_recipe(settings, training=False)
    assert "~nobody-of-this-name" in raised.error.message


@pytest.mark.parametrize(("bad", "code"), BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "setting", ["run.dir", "model.name", "reference.cache", "rollout.folder", "data.eval.0.path"]
)
def test_a_path_that_no_file_system_can_hold_names_its_setting(
    bad: str, code: str, setting: str
) -> None:
    settings: dict[str, Any] = {"method": "kto", "model": {"name": "m"}}
    section, name = setting.split(".")[0], setting.split(".")[1]
    settings[section] = {
        **settings.get(section, {}),
        name: [{"path": bad}] if section == "data" else bad,
    }
    if "\ud800" in bad:  # of all text in a recipe
        code = "text-encoding"
    with raises_error(code, where=setting) as raised:
        load_recipe(settings, training=False)
    assert len(str(raised.error)) < 500


@pytest.mark.parametrize(("bad", "code"), BAD.values(), ids=BAD)
def test_objects_that_write_refuse_such_a_path(bad: str, code: str, tmp_path: Path) -> None:
    with raises_error(code):
        RunFolder(tmp_path / bad)
    with raises_error(code):
        OutputFile(tmp_path / f"{bad}.jsonl", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a recipe and a finished run. No test here changes it."""
    folder = tmp_path_factory.mktemp("trained")
    write_place(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        overrides = ["run.dir=run", "train.max_steps=1", "data.limit=5"]
        valence.train("recipe.yaml", overrides=overrides, quiet=True)
    return folder


@pytest.mark.parametrize("words", [
    ["train", "recipe.yaml", f"run.dir={LONG}"],
    ["train", "recipe.yaml", 'run.dir="a\\0b"'],
    ["train", LONG],
    ["check", "recipe.yaml", f"run.dir={LONG}"],
    ["report", "--list", LONG],
    ["export", "run", LONG],
    ["export", "run", f"{LONG}/out"],
    ["export", LONG, "out"],
    ["evaluate", "run", "--out", LONG],
    ["evaluate", LONG],
    ["evaluate", "run", "--data", LONG],
    ["sample", "run", "--prompt", "a", "--max-new-tokens", "1", "--out", f"{LONG}.jsonl"],
    ["sample", LONG, "--prompt", "a"],
    ["sample", "run", "--data", '{path: "a\\0b"}', "--out", "out.jsonl"],
    ["score", "run", "--data", "rows.jsonl", "--out", f"{LONG}.jsonl"],
    ["score", "recipe.yaml", f"reference.cache={LONG}"],
    ["report", "run", "--out", LONG],
    ["report", "run", "--md", "--out", f"{LONG}/x.md"],
    ["report", LONG],
    ["inspect", LONG],
    ["check", LONG],
    ["check", f"{LONG}/recipe.yaml"],
    ["score", "run", "--data", LONG, "--out", "out.jsonl"],
    ["sample", "run", "--data", f"{LONG}.jsonl", "--out", "out.jsonl"],
], ids=lambda words: " ".join(word[:20] for word in words))  # fmt: skip
def test_no_command_ends_with_a_traceback_for_such_a_path(
    words: list[str],
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(trained)
    error = command_error(*words)
    check_error(error, "path-too-long" if LONG in " ".join(words) else "path-invalid")
    shown = capsys.readouterr().err
    assert shown.count("valence: ") == 1
    assert len(shown) < 1000


def test_doctor_names_such_a_path_in_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("doctor", LONG, "--json") == 2
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["about"] for row in rows if row["state"] == "problem"] == ["recipe"]
