"""No file that is read or written executes code, and no name in the data becomes a path."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.arch.source import FILES, ROOT, imports, is_in, tree
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.test_run import recipe

WORKER_PIPE = (
    "valence/apps/serve/reward_workers.py",
    "valence/apps/serve/reward_worker_process.py",
)
"""A server sends calls to its own worker through a pipe that nobody else writes to.

Replies are JSON.
"""
UNNAMED_FILE = ("valence/data/example_store.py",)
"""A process stores rows in a temporary file without a name, to which no other program can write."""
SENDS_HANDLES = ("valence/rollouts/transports.py",)
"""vLLM reads the handle of GPU memory as a pickle. Valence writes it, and reads none."""
PICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")


def calls(module: ast.Module) -> Iterator[str]:
    """``name.attribute`` of what is called by such a name, and ``argument=`` of keyword
    arguments.
    """
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield from (f"{keyword.arg}=" for keyword in node.keywords)
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}"


def test_no_module_reads_or_writes_pickles() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for _, name in imports(path)
        if any(is_in(name, module) for module in PICKLERS)
    }
    assert users == {*WORKER_PIPE, *UNNAMED_FILE, *SENDS_HANDLES}
    for name in SENDS_HANDLES:
        assert not {"pickle.load", "pickle.loads"} & set(calls(tree(ROOT / name)))
    forbidden = {"torch.load", "torch.save", "yaml.load", "allow_pickle=", "weights_only="}
    for path in FILES:
        assert set(calls(tree(path))) & forbidden == set(), path


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_weights_that_are_a_pickle_with_code_are_not_run(name: str, tmp_path: Path) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = recipe(model, tmp_path)
    if name == "pytorch_model.bin":
        (model / "model.safetensors").unlink()
        where = model
    else:
        valence.train(
            recipe(
                model,
                tmp_path,
                model={"lora": {"rank": 2}},
                run={"dir": str(tmp_path / "r"), "export": "adapter"},
            ),
            quiet=True,
        )
        where = tmp_path / "r/model"
        (where / "adapter_model.safetensors").unlink()
        settings["model"]["adapter"] = str(where)
    with (where / name).open("wb") as file:
        torch.save({"weight": Bomb(mark)}, file) if name == "adapter_model.bin" else pickle.dump(
            {"weight": Bomb(mark)}, file
        )
    with pytest.raises(Exception):  # noqa: B017 - of the library that reads it, whichever that is
        valence.train(settings, quiet=True)
    assert not mark.exists()


def test_code_that_comes_with_a_model_is_not_run_unless_asked(tmp_path: Path) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    with pytest.raises(Exception):  # noqa: B017
        valence.train(recipe(model, tmp_path), quiet=True)
    assert not mark.exists()


def test_names_in_the_data_are_no_paths(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = recipe(model, tmp_path, run={"dir": str(tmp_path / "out/run")})
    evil = "../../../evil"
    rows = [
        {
            "id": evil,
            "source": evil,
            "prompt": f"{evil} {i}",
            "completion": evil + str(i),
            "label": bool(i % 2),
            evil: evil,
        }
        for i in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = set(tmp_path.rglob("*"))
    valence.train(settings, quiet=True)
    result = set(tmp_path.rglob("*")) - before
    assert result
    assert [
        path for path in result if "evil" in path.name or not path.is_relative_to(tmp_path / "out")
    ] == []
