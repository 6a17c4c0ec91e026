"""Trackers that a recipe names: mistakes are errors before the run, and the guide's example
runs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.blocks import blocks
from tests.errors import raises_error
from tests.reports.tracked_runs import ROOT, home
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.config.load import load_recipe
from valence.errors import install_command
from valence.reports.trackers import LIBRARIES, check

__all__ = ["home"]


def test_a_library_that_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in LIBRARIES:
        monkeypatch.setitem(sys.modules, kind, None)
        with raises_error("library-missing", where="run.sinks", fix=install_command(kind)):
            check({"kind": kind})


def test_wandb_never_asks_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wandb" in str(check({"kind": "wandb", "mode": "auto"}))
    assert check({"kind": "wandb", "mode": "offline"}) is None
    with raises_error("tracker-login-missing", where="wandb", fix="WANDB_API_KEY"):
        check({"kind": "wandb", "mode": "online"})
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password " + "a" * 40)
    monkeypatch.setenv("NETRC", str(netrc))
    assert check({"kind": "wandb", "mode": "online"}) is None
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check({"kind": "wandb", "mode": "auto"}) is None


def loaded(sinks: Any) -> Any:
    recipe = {
        "method": "kto",
        "model": {"name": "m"},
        "data": {"train": []},
        "run": {"sinks": sinks},
    }
    result = load_recipe(recipe, in_memory=["train"])
    return [(sink.kind, sink.project, sink.tags) for sink in result.recipe.run.sinks]


def test_sinks_are_names_or_sections() -> None:
    assert loaded("wandb") == [("wandb", None, [])]
    assert loaded(["tensorboard", {"kind": "wandb", "project": "mine", "tags": ["a"]}]) == [
        ("tensorboard", None, []), ("wandb", "mine", ["a"]),
    ]  # fmt: skip
    assert loaded(None) == loaded([]) == []


@pytest.mark.parametrize(
    ("sinks", "code", "where", "fix"),
    [
        (["tensorbord"], "setting-conflict", "run.sinks.0.kind", "tensorboard"),
        (
            [{"kind": "wandb", "projekt": "mine"}],
            "setting-unknown",
            "run.sinks.0.projekt",
            "run.sinks.0.project?",
        ),
        (
            [{"kind": "tensorboard", "project": "mine"}],
            "setting-no-effect",
            "run.sinks.0.project",
            "folder",
        ),
        (
            [{"kind": "trackio", "mode": "offline"}],
            "setting-no-effect",
            "run.sinks.0.mode",
            "folder",
        ),
        (["wandb", {"kind": "wandb"}], "setting-duplicate", "run.sinks.1", None),
        ([{"project": "mine"}], "setting-missing", "run.sinks.0.kind", "kind"),
    ],
)
def test_a_mistake_about_a_sink_is_found_when_the_recipe_is_read(
    sinks: Any,
    code: str,
    where: str,
    fix: str | None,
) -> None:
    with raises_error(code, where=where, fix=fix):
        loaded(sinks)


def test_the_example_in_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (block,) = blocks((ROOT / "docs/train/watch.md").read_text(encoding="utf-8"), "python")
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    rows = [
        {"prompt": f"question {i} ", "completion": f"answer {i}", "label": i % 2 == 0}
        for i in range(8)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = (
        "{method: kto, model: {name: model}, data: {train: rows.jsonl, eval: rows.jsonl}, "
        "train: {batch_size: 4}}"
    )
    Path("recipe.yaml").write_text(recipe)
    exec(block.text, {})
    assert re.search(r": 0\.\d{4}\n", capsys.readouterr().out)
