"""The commands for what comes with the package: the demo, the recipes and the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.command import command, command_error, place
from tests.errors import check_error
from valence.config.load import load_recipe
from valence.data.split import PromptSplit
from valence.methods import METHODS, ONLINE
from valence.rewards.rules import RULES
from valence.shipped import find_page, pages, recipes, write_demo

__all__ = ["place"]

CODE = Path(__file__).parent.parent / "valence"
PAGE = re.compile(r"`valence docs ([\w/-]+)`")


def test_recipes_are_listed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("docs") == 0
    listed = capsys.readouterr().out
    for name in recipes():
        assert name in listed
        path = tmp_path / f"{name}.yaml"
        assert command("init", "--recipe", name, "--out", str(path)) == 0
        text = path.read_text(encoding="utf-8")
        assert "method" in YAML().load(text)
        assert "../" not in text  # the rows are in the folder of the recipe
    error = command_error("init", "--recipe", name, "--out", str(path))
    check_error(error, "path-exists", where=str(path))
    error = command_error("init", "--recipe", "kot")
    check_error(error, "argument-invalid", where="--recipe", fix="use kto")
    error = command_error("init", "--recipe", "online_distill")
    check_error(error, "argument-invalid", where="--recipe", fix="use distill")
    error = command_error("init", "rows.jsonl", "--recipe", "kto")
    check_error(error, "option-conflict", where="FILE")


def test_pages_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("docs") == 0
    listed = capsys.readouterr().out
    assert {"train/methods", "online/rewards", "losses/thumbs"} <= set(listed.split())
    assert command("docs", "rewards") == 0
    page = pages()["online/rewards"].read_text(encoding="utf-8")
    assert capsys.readouterr().out == page.rstrip() + "\n"
    assert find_page("online/vllm.md") == pages()["online/vllm"]
    check_error(command_error("docs", "rewrads"), "argument-invalid", fix="valence docs rewards")


def test_messages_name_pages_that_exist() -> None:
    named = {
        (name, path)
        for path in CODE.rglob("*.py")
        for name in PAGE.findall(re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8")))
    }
    assert len(named) > 5
    others = {*METHODS, *ONLINE, *RULES, "NAME", "RULE"}
    assert [place for place in named if place[0] not in others and not find_page(place[0])] == []


def test_the_demo_is_written_once(tmp_path: Path) -> None:
    recipe = write_demo(tmp_path / "demo")
    loaded = load_recipe(recipe).recipe
    assert loaded.run.dir == (tmp_path / "demo" / "run").as_posix()
    assert loaded.data.train[0].path == (tmp_path / "demo" / "answers.jsonl").as_posix()
    assert isinstance(loaded.data.split, PromptSplit)
    rows = [json.loads(line) for line in (tmp_path / "demo" / "answers.jsonl").open()]
    assert all(row["prompt"] and row["completion"] for row in rows)
    recipe.write_text("method: sft\n")
    (tmp_path / "demo" / "answers.jsonl").write_text("mine\n")
    assert write_demo(tmp_path / "demo").read_text() == "method: sft\n"
    assert (tmp_path / "demo" / "answers.jsonl").read_text() == "mine\n"
    (tmp_path / "file").write_text("")
    check_error(command_error("demo", "--out", str(tmp_path / "file")), "file-not-writable")


def test_the_demo_trains_and_resumes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.limit=24", "run.samples.prompts=1", "run.samples.max_new_tokens=2"]
    words = ["demo", "--out", "d", "model.name=./model", *small, "train.epochs=1"]
    assert command(*words) == 0
    assert Path("d/run/report.html").exists()
    capsys.readouterr()
    assert command(*words) == 0
    assert "nothing to do" in capsys.readouterr().out
