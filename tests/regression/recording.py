"""Run the recipes with the package of a tree, and keep what has to stay the same.

A recording is a folder with ``inputs.json`` (the SHA-256 of each input) and a folder per recipe:

    metrics.jsonl          the log, without what differs each time the same is computed
    weights.safetensors    the tensors of the exported model, and of each checkpoint's model, named
                           FILE:TENSOR
    error.txt              instead of both: why the run failed

Warnings of all runs are in ``messages.txt``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.regression.inputs import digests
from tests.regression.recipes import RECIPES, Recipe

DRIVER = Path(__file__).with_name("driver.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VALENCE_DTYPE": "float32",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
}
TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
"""Variables that change how output is printed."""
CHANGING = ("seconds", "tokens/s", "memory")
"""How the names of numbers begin that differ each time the same is computed."""
INPUTS, MESSAGES = "inputs.json", "messages.txt"
METRICS, WEIGHTS, ERROR = "metrics.jsonl", "weights.safetensors", "error.txt"


def record(
    out: Path, tree: Path, inputs: Path, recipes: Sequence[Recipe] = RECIPES
) -> dict[str, str]:
    """Write a recording into the new folder ``out``. Returns the error of each recipe that failed.

    tree: the folder that holds the package. inputs: the folder that ``write_inputs`` wrote.
    Raises FileExistsError for a folder that exists, and RuntimeError when the package cannot be
    imported from the tree.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / INPUTS).write_text(json.dumps(digests(inputs), indent=1), encoding="utf-8")
    with TemporaryDirectory() as name:
        runs = Path(name)
        plan = [_plan(recipe, runs) for recipe in recipes]
        result = drive(runs, tree, inputs, out / MESSAGES, runs=plan) if plan else {}
        for recipe in recipes:
            _keep(out / recipe.name, runs / recipe.name, result[recipe.name]["error"])
    return {name: item["error"] for name, item in result.items() if item["error"]}


def _plan(recipe: Recipe, runs: Path) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "recipe": recipe.path,
        "folder": str(runs / recipe.name),
        "processes": recipe.processes,
        "starts": [vars(start) for start in recipe.starts],
    }


def drive(
    work: Path,
    tree: Path,
    folder: Path,
    messages: Path,
    *,
    runs: Sequence[Mapping[str, Any]] = (),
    commands: Sequence[Mapping[str, Any]] = (),
) -> dict[str, dict[str, Any]]:
    """Run the driver in ``folder`` with the package of a tree. Returns its result.

    work: a folder for files of the driver. messages: a file for its standard error. runs,
    commands: as ``driver.py`` describes them.
    """
    plan = {
        "tree": str(tree.resolve()),
        "runs": runs,
        "commands": commands,
        "result": str(work / "result.json"),
    }
    (work / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    variables = {"PYTHONPATH": plan["tree"], "XDG_CACHE_HOME": str(work / "cache")}
    environment = os.environ | ENVIRONMENT | variables
    for name in TERMINAL:
        environment.pop(name, None)
    # -P: the driver's own folder is not searched for modules.
    command = [sys.executable, "-P", str(DRIVER), str(work / "plan.json")]
    with messages.open("wb") as stderr:
        done = subprocess.run(command, cwd=folder, env=environment, stderr=stderr, check=False)
    if done.returncode:
        raise RuntimeError(messages.read_text(encoding="utf-8"))
    return json.loads((work / "result.json").read_text(encoding="utf-8"))


def _keep(out: Path, run: Path, error: str | None) -> None:
    out.mkdir()
    if error:
        (out / ERROR).write_text(error, encoding="utf-8")
        return
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    remaining = [_repeatable(json.loads(line)) for line in lines]
    text = "".join(json.dumps(item) + "\n" for item in remaining)
    (out / METRICS).write_text(text, encoding="utf-8")
    save_file(_weights(run), out / WEIGHTS)


def _repeatable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(CHANGING)}


def _weights(run: Path) -> dict[str, torch.Tensor]:
    files = [*run.glob("model/*.safetensors"), *run.glob("checkpoints/*/model/*.safetensors")]
    return {
        f"{path.relative_to(run).as_posix()}:{name}": tensor
        for path in files
        for name, tensor in load_file(path).items()
    }
