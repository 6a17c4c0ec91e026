"""Exported folders reveal no paths of this machine when they are published, and load elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.command import command, place
from valence.training.model_files import portable_name, portable_settings

__all__ = ["place"]


@pytest.mark.parametrize(
    ("name", "portable"),
    [
        ("owner/model", "owner/model"),
        ("model", "model"),
        ("./model", "./model"),
        ("/data/models/chat", "chat"),
        ("/data/models/chat/", "chat"),
        ("~/chat", "chat"),
    ],
)
def test_hub_ids_and_relative_paths_stay(name: str, portable: str) -> None:
    assert portable_name(name) == portable


@pytest.mark.parametrize("export", ["adapter", pytest.param("merged", marks=pytest.mark.slow)])
def test_an_exported_model_holds_no_absolute_path(
    export: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = place / "private folder"
    away.mkdir()
    for name in ("model", "rows.jsonl", "recipe.yaml"):
        shutil.move(place / name, away / name)
    data = [{"path": str(away / "rows.jsonl")}]
    settings = (
        f"model.name={json.dumps(str(away / 'model'))}",
        f"data.train={json.dumps(data)}",
        "data.eval=[]",
    )
    folder = place / "runs/first"
    words = (
        str(away / "recipe.yaml"),
        *settings,
        f"run.dir={json.dumps(str(folder))}",
        f"run.export={export}",
    )
    assert command("train", *words) == 0
    for path in sorted((folder / "model").iterdir()):
        if path.name == "adapter_config.json":  # on this machine it must name the base model
            assert str(away / "model") in path.read_text(encoding="utf-8")
        elif path.suffix in (".json", ".md", ".jinja"):
            assert str(place) not in path.read_text(encoding="utf-8"), path.name
            assert "private folder" not in path.read_text(encoding="utf-8"), path.name
    assert "rows.jsonl" in (folder / "model/README.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert command("sample", str(folder / "model"), "--prompt", "hi", "--max-new-tokens", "2") == 0
    if export == "adapter":
        uploaded = portable_settings(folder / "model")["adapter_config.json"]
        assert json.loads(uploaded)["base_model_name_or_path"] == "model"
        assert str(place) not in uploaded
        base = AutoModelForCausalLM.from_pretrained(away / "model")
        PeftModel.from_pretrained(base, folder / "model")
        shutil.copytree(folder / "model", place / "elsewhere")
        words = ("sample", "elsewhere", "--prompt", "hi", "--max-new-tokens", "2")
        assert command(*words, f"model.name={json.dumps(str(away / 'model'))}") == 0
