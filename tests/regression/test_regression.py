"""The comparison notices every kind of difference, and one recipe gives the same result twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.regression.__main__ import ROOT
from tests.regression.command_recording import ERRORS_FILE, OUTPUTS_FILE, record_commands
from tests.regression.commands import OUTPUTS, select
from tests.regression.comparison import TOLERANCE, compare, compare_recipe
from tests.regression.inputs import digests, write_inputs
from tests.regression.mistakes import ERRORS
from tests.regression.normalizing import Normalizer
from tests.regression.recipes import RECIPES
from tests.regression.recording import ERROR, INPUTS, METRICS, WEIGHTS, record

LOG: list[dict[str, Any]] = [
    {"step": 0, "eval/loss": 0.7},
    {"step": 1, "loss": 0.5, "lr": 1e-3, "state": "nan"},
    {"step": 2, "loss": 0.25, "lr": 5e-4, "state": "nan"},
]
TENSORS = {"model:head": torch.tensor([3.0, 4.0]), "model:norm": torch.ones(2)}


def write_recording(
    folder: Path,
    log: Sequence[Mapping[str, Any]] = LOG,
    tensors: Mapping[str, Tensor] = TENSORS,
    inputs: Mapping[str, str] = {"rows": "0"},
) -> Path:
    """Write a recording of the recipes `first`, which is as above, and `second`."""
    for name, lines, weights in (("first", LOG, TENSORS), ("second", log, tensors)):
        (folder / name).mkdir(parents=True)
        text = "".join(json.dumps(record) + "\n" for record in lines)
        (folder / name / METRICS).write_text(text, encoding="utf-8")
        save_file(dict(weights), folder / name / WEIGHTS)
    (folder / INPUTS).write_text(json.dumps(inputs), encoding="utf-8")
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "ours")


def changed_log(index: int, **values: Any) -> list[dict[str, Any]]:
    return [record | values if i == index else record for i, record in enumerate(LOG)]


def verdicts(ours: Path, theirs: Path) -> tuple[bool, list[str]]:
    """Whether both agree, and the lines that are printed."""
    lines: list[str] = []
    return compare(ours, theirs, lines.append), lines


def test_equal_recordings_are_identical(ours: Path, tmp_path: Path) -> None:
    agree, lines = verdicts(ours, write_recording(tmp_path / "theirs"))
    assert agree
    assert [line.split() for line in lines[:2]] == [["first", "identical"], ["second", "identical"]]
    assert lines[2] == "2 recipes: 2 identical, 0 within 1e-06, 0 different"


def test_a_changed_metric_is_named_with_its_step(ours: Path, tmp_path: Path) -> None:
    log = changed_log(1, loss=0.4)
    log[2] = log[2] | {"loss": 0.5}
    theirs = write_recording(tmp_path / "theirs", log)
    result = compare_recipe(ours / "second", theirs / "second")
    assert [(metric.where, metric.relative) for metric in result.metrics] == [
        ("loss at step 1", pytest.approx(0.2)),
        ("loss at step 2", 0.5),
    ]
    assert not result.tensors
    agree, lines = verdicts(ours, theirs)
    assert not agree
    assert [line for line in lines if "loss at step 2" in line and "0.25 and 0.5" in line]
    assert [line for line in lines if "first metric" in line and "loss at step 1" in line]
    assert lines[-1] == "2 recipes: 1 identical, 0 within 1e-06, 1 different"


def test_a_metric_that_is_no_number_any_more_differs(ours: Path, tmp_path: Path) -> None:
    for name, value in (("state", "inf"), ("loss", "nan")):
        theirs = write_recording(tmp_path / name, changed_log(1, **{name: value}))
        assert not verdicts(ours, theirs)[0]


def test_a_changed_weight_is_named_with_its_relative_norm(ours: Path, tmp_path: Path) -> None:
    weights = TENSORS | {"model:head": torch.tensor([3.0, 4.5])}
    theirs = write_recording(tmp_path / "theirs", tensors=weights)
    result = compare_recipe(ours / "second", theirs / "second")
    norm = (3.0**2 + 4.5**2) ** 0.5
    assert [(tensor.where, tensor.relative) for tensor in result.tensors] == [
        ("model:head", pytest.approx(0.5 / norm)),
    ]
    assert not result.metrics
    assert not verdicts(ours, theirs)[0]


def test_weights_that_are_not_numbers_differ(ours: Path, tmp_path: Path) -> None:
    weights = TENSORS | {"model:head": torch.tensor([3.0, float("nan")])}
    assert not verdicts(ours, write_recording(tmp_path / "theirs", tensors=weights))[0]


@pytest.mark.parametrize(("factor", "agrees"), [(0.5, True), (2.0, False)])
def test_the_tolerance_is_relative(factor: float, agrees: bool, ours: Path, tmp_path: Path) -> None:
    log = changed_log(1, lr=1e-3 * (1 + factor * TOLERANCE))
    of_metrics = write_recording(tmp_path / "metrics", log)
    weights = {name: value.double() for name, value in TENSORS.items()}
    scaled = {name: value * (1 + factor * TOLERANCE) for name, value in weights.items()}
    of_weights = write_recording(tmp_path / "weights", tensors=scaled)
    assert verdicts(ours, of_metrics)[0] is agrees
    in_float64 = write_recording(tmp_path / "float64", tensors=weights)
    assert verdicts(in_float64, of_weights)[0] is agrees
    assert verdicts(ours, of_metrics)[1][-1].startswith("2 recipes: 1 identical")


MISSING = {
    "a metric": {"log": [LOG[0], LOG[1], {"step": 2, "loss": 0.25, "lr": 5e-4}]},
    "a step": {"log": LOG[:2]},
    "a tensor": {"tensors": {"model:head": TENSORS["model:head"]}},
    "an element": {"tensors": TENSORS | {"model:norm": torch.ones(1)}},
    "precision": {"tensors": TENSORS | {"model:norm": torch.ones(2).bfloat16()}},
    "an input": {"inputs": {}},
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_value_that_one_recording_lacks_is_a_difference(
    kind: str, ours: Path, tmp_path: Path
) -> None:
    theirs = write_recording(tmp_path / "theirs", **MISSING[kind])
    assert not verdicts(ours, theirs)[0]
    assert not verdicts(theirs, ours)[0]


@pytest.mark.parametrize("kind", ["is missing", "failed", "failed in both"])
def test_a_recipe_without_results_is_a_difference(kind: str, ours: Path, tmp_path: Path) -> None:
    theirs = write_recording(tmp_path / "theirs")
    for folder in (ours, theirs) if kind == "failed in both" else (theirs,):
        for path in (folder / "second").iterdir():
            path.unlink()
        if kind == "is missing":
            (folder / "second").rmdir()
        else:
            (folder / "second" / ERROR).write_text("Traceback\nValueError: why", encoding="utf-8")
    agree, lines = verdicts(ours, theirs)
    assert not agree
    assert lines[-1] == "2 recipes: 1 identical, 0 within 1e-06, 1 different"
    assert kind == "is missing" or any("ValueError: why" in line for line in lines)


def test_there_are_twenty_recipes_with_distinct_names() -> None:
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES) == 20


PACKAGE = """
import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file


def train(recipe, *, overrides, quiet, callbacks=()):
    if "ipo" in recipe:
        raise ValueError("no such method")
    folder = Path(json.loads(overrides[-1].removeprefix("run.dir=")))
    (folder / "model").mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as log:
        for step in (1, 2, 3, 4, 5, 6):
            record = {"step": step, "has_overrides": len(overrides) > 1}
            record |= {"seconds": 1.0, "tokens/s": 2.0, "memory": 3.0}
            log.write(json.dumps(record) + "\\n")
            log.flush()
            for callback in callbacks:
                callback(None, record)
    save_file({"head": numpy.ones(2, numpy.float32)}, folder / "model" / "model.safetensors")
"""
"""A package that has nothing but the public interface."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with PACKAGE, in which the driver also finds its inputs."""
    (tmp_path / "tree" / "valence").mkdir(parents=True)
    (tmp_path / "tree" / "valence" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    return tmp_path / "tree"


def test_a_recording_contains_reproducible_values(tree: Path, tmp_path: Path) -> None:
    recipes = [recipe for recipe in RECIPES if recipe.name in ("kto", "ipo", "resumed")]
    errors = record(tmp_path / "out", tree, tree, recipes)
    assert list(errors) == ["ipo"]
    assert "no such method" in (tmp_path / "out" / "ipo" / ERROR).read_text(encoding="utf-8")
    logs = {
        name: (tmp_path / "out" / name / METRICS).read_text(encoding="utf-8").splitlines()
        for name in ("kto", "resumed")
    }
    assert [json.loads(line) for line in logs["kto"]] == [
        {"step": step, "has_overrides": False} for step in range(1, 7)
    ]
    # Killed at step 5, started again, and continued with another setting.
    steps = [json.loads(line)["step"] for line in logs["resumed"]]
    assert steps == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert json.loads(logs["resumed"][-1])["has_overrides"]
    weights = load_file(tmp_path / "out" / "kto" / WEIGHTS)
    assert {name: value.tolist() for name, value in weights.items()} == {
        "model/model.safetensors:head": [1.0, 1.0]
    }


def test_a_package_from_elsewhere_is_not_recorded(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RuntimeError):
        record(tmp_path / "out", empty, empty, RECIPES[:1])


# Commands

OUTPUT: dict[str, Any] = {
    "status": 0,
    "code": None,
    "stdout": "one\ntwo\n",
    "stderr": "",
    "removed": [],
    "files": {"rows.jsonl": "{}\n", "model.gguf": "SHA-256 0"},
}
ERROR_RECORD: dict[str, Any] = {
    "status": 2,
    "code": "setting-unknown",
    "place": "recipe.yaml:3 (train.sed)",
    "problems": [],
    "sentence": "there is no such setting",
}


def write_commands(folder: Path, output: Mapping[str, Any], error: Mapping[str, Any]) -> Path:
    """Write a recording of commands alone."""
    folder.mkdir()
    (folder / INPUTS).write_text("{}", encoding="utf-8")
    records = ((OUTPUTS_FILE, output, OUTPUT), (ERRORS_FILE, error, ERROR_RECORD))
    for file, first, second in records:
        text = json.dumps({"first": first, "second": second})
        (folder / file).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"status": 1}, "status: 0 and 1"),
        ({"code": "file-empty"}, "code: None and file-empty"),
        ({"stdout": "one\nthree\n"}, "stdout"),
        ({"stderr": "warning"}, "stderr"),
        ({"removed": ["x"]}, "removed"),
        ({"files": {"model.gguf": "SHA-256 0"}}, "rows.jsonl"),
        ({"files": OUTPUT["files"] | {"new": ""}}, "new"),
        ({"files": OUTPUT["files"] | {"model.gguf": "SHA-256 1"}}, "model.gguf"),
        ({"files": OUTPUT["files"] | {"rows.jsonl": "{}"}}, "rows.jsonl"),
    ],
)
def test_a_changed_output_is_reported(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    ours = write_commands(tmp_path / "ours", OUTPUT, ERROR_RECORD)
    agree, lines = verdicts(ours, write_commands(tmp_path / "new", OUTPUT | changes, ERROR_RECORD))
    assert agree is not bool(changes)
    assert any(expected in line for line in lines)
    assert f"2 outputs: {1 if changes else 2} identical, {int(bool(changes))} different" in lines


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"status": 1}, "status: 2 and 1"),
        ({"code": "setting-type"}, "code: setting-unknown and setting-type"),
        ({"place": "recipe.yaml:4"}, "place: recipe.yaml:3 (train.sed) and recipe.yaml:4"),
        ({"problems": [["setting-type", "recipe.yaml:4"]]}, "problems"),
    ],
)
def test_a_changed_error_is_reported(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    ours = write_commands(tmp_path / "ours", OUTPUT, ERROR_RECORD)
    write_commands(tmp_path / "new", OUTPUT, ERROR_RECORD | changes)
    agree, lines = verdicts(ours, tmp_path / "new")
    assert agree is not bool(changes)
    assert any(expected in line for line in lines)


def test_a_changed_sentence_is_printed_and_is_no_difference(tmp_path: Path) -> None:
    ours = write_commands(tmp_path / "ours", OUTPUT, ERROR_RECORD)
    error = ERROR_RECORD | {"sentence": "this setting does not exist"}
    agree, lines = verdicts(ours, write_commands(tmp_path / "new", OUTPUT, error))
    assert agree
    assert any(error["sentence"] in line for line in lines)


@pytest.mark.parametrize("file", [OUTPUTS_FILE, ERRORS_FILE])
def test_a_part_or_a_command_that_one_recording_lacks_is_a_difference(
    file: str, tmp_path: Path
) -> None:
    ours = write_commands(tmp_path / "ours", OUTPUT, ERROR_RECORD)
    theirs = write_commands(tmp_path / "theirs", OUTPUT, ERROR_RECORD)
    commands = json.loads((theirs / file).read_text(encoding="utf-8"))
    (theirs / file).write_text(json.dumps({"first": commands["first"]}), encoding="utf-8")
    assert not verdicts(ours, theirs)[0]
    (theirs / file).unlink()
    assert not verdicts(ours, theirs)[0]
    assert not verdicts(theirs, ours)[0]


def test_recordings_without_any_part_do_not_agree(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / INPUTS).write_text("{}", encoding="utf-8")
    assert not verdicts(tmp_path / "ours", tmp_path / "theirs")[0]


NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("stdout", "training 1/3  9.5 tok/s  0.3s left\nloss 0.5\n", "loss 0.5\n"),
        (
            "stdout",
            "training 3/3  99 tok/s  1m3s  loss 2",
            "training 3/3  <n> tok/s  <time>  loss 2",
        ),
        ("stdout", "in /folder/place/rows.jsonl", "in <folder>/rows.jsonl"),
        ("a.jsonl", '{"seconds": 1.5, "loss": 0.25}', '{"seconds": <n>, "loss": 0.25}'),
        ("a.json", '"2026-05-01T12:00:05+00:00"', '"<now>+00:00"'),
        ("a.json", '"2026-05-01T11:00:05+00:00"', '"2026-05-01T11:00:05+00:00"'),
        ("a/run.json", '{"crc": 5, "rows": 5}', '{"crc": <n>, "rows": 5}'),
        ("a/rows.json", '{"crc": 5}', '{"crc": 5}'),
        ("stdout", "AUC 0.78 on 6 rows, 78 %", "AUC 0.78 on 6 rows, 78 %"),
    ],
)
def test_only_what_changes_each_time_is_replaced(name: str, text: str, expected: str) -> None:
    normalizer = Normalizer({Path("/folder/place"): "<folder>"}, NOW, NOW + timedelta(seconds=9))
    assert normalizer.text(text, name) == expected


def test_names_are_distinct_and_every_command_that_is_needed_exists() -> None:
    items = [*RECIPES, *OUTPUTS, *ERRORS]
    assert len({item.name for item in items}) == len(items)
    for command in OUTPUTS:
        assert select(OUTPUTS, [command.name])[-1] == command


@pytest.fixture
def forks(forking_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is forked from what has torch loaded."""
    monkeypatch.setattr(sys, "executable", forking_python)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_commands_are_recorded_twice_alike(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    outputs = select(OUTPUTS, ["import_langfuse", "audit", "sample_seed", "runs", "report"])
    errors = [item for item in ERRORS if item.name in ("error_setting_unknown", "error_row_syntax")]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / INPUTS).write_text("{}", encoding="utf-8")
        record_commands(tmp_path / name, ROOT, tmp_path / "inputs", outputs, errors)
    agree, lines = verdicts(tmp_path / "first", tmp_path / "second")
    assert agree, lines
    result = json.loads((tmp_path / "first" / ERRORS_FILE).read_text(encoding="utf-8"))
    places = {name: (item["status"], item["code"], item["place"]) for name, item in result.items()}
    assert places == {
        "error_setting_unknown": (2, "setting-unknown", "command line (train.sed)"),
        "error_row_syntax": (2, "json-syntax", "rows.jsonl:2"),
    }
    outputs_of = json.loads((tmp_path / "first" / OUTPUTS_FILE).read_text(encoding="utf-8"))
    assert all(item["status"] == 0 for item in outputs_of.values())
    assert "runs/kto/model/model.safetensors" in outputs_of["train_kto"]["files"]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_run_that_is_killed_and_resumed_is_recorded_twice_alike(tmp_path: Path) -> None:
    inputs, again = tmp_path / "inputs", tmp_path / "again"
    write_inputs(inputs)
    write_inputs(again)
    assert digests(inputs) == digests(again)
    recipes = [recipe for recipe in RECIPES if recipe.name == "resumed"]
    folders = [tmp_path / "first", tmp_path / "second"]
    assert [record(folder, ROOT, inputs, recipes) for folder in folders] == [{}, {}]
    result = compare_recipe(*(folder / "resumed" for folder in folders))
    assert result.is_identical
    log = (folders[0] / "resumed" / METRICS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(12))
