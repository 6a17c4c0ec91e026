"""Reading a file of a run's folder detects changes since it was written, and names the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.training.conftest import SharedRuns
from tests.training.resuming import killed, records, settings, train, weights
from tests.training.scoring import invoke
from tests.training.test_run import folder
from valence.reports.run_record import RunRecord, config_of, place_of_run
from valence.reports.runs import list_runs
from valence.reports.sinks import JsonlSink
from valence.storage import add_checksum, add_checksum_line, verify, verify_text
from valence.training.open_run import restore

__all__ = ["folder", "settings"]


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def facts_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


# What the checksums find


@pytest.mark.parametrize("bit", [1, 2, 8, 64])
def test_no_bit_of_an_object_or_of_a_text_may_change(bit: int) -> None:
    value = {"step": 3, "text": "é\n", "rows": [{"x": 1.5, "none": None}], "yes": True}
    full = json.dumps(add_checksum(value), indent=1).encode()
    sealed = add_checksum_line("method: kto\ntrain:\n  seed: 7\n").encode()
    unseen: list[int] = []
    for at in range(len(full)):
        try:
            result = verify(
                json.loads(full[:at] + bytes([full[at] ^ bit]) + full[at + 1 :]), required=True
            )
        except ValueError:
            continue
        unseen += [at] if result != value else []
    for at in range(sealed.index(b"#")):
        changed = sealed[:at] + bytes([sealed[at] ^ bit]) + sealed[at + 1 :]
        with pytest.raises(ValueError):  # also of a text that is no UTF-8 any more
            verify_text(changed.decode())
    assert unseen == []


def test_keys_and_values_that_json_writes_as_text_keep_their_checksum() -> None:
    value = {10: 1, 9: 2, "path": Path("a"), "pair": (1, 2), "half": "\ud800"}
    assert verify(json.loads(json.dumps(add_checksum(value), default=str)), required=True)["9"] == 2  # type: ignore[arg-type]


# A run that goes on


@pytest.mark.parametrize("write", [
    dict,  # with the checksum of what it said before
    pytest.param(add_checksum, marks=pytest.mark.slow),
])  # fmt: skip
def test_run_json_does_not_override_a_checkpoint(
    write: Callable[[dict[str, Any]], dict[str, Any]], shared_runs: SharedRuns, tmp_path: Path
) -> None:
    """Neither damaged nor with a checksum that fits what it says."""
    shared_runs.copy(tmp_path / "whole")
    full = restore(tmp_path / "whole/run")
    settings = shared_runs.copy(tmp_path, killed_at=6)
    facts = facts_of(tmp_path / "run")
    ((_, _, tokens),) = facts["micro_batch_tokens"]
    other = {**facts, "micro_batch_tokens": [[0, "evaluation", 64]]}
    (tmp_path / "run/run.json").write_text(json.dumps(write(other)))
    again, _ = train(settings)
    assert again.state.budget.at(9, "training") == tokens > 64
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())


def test_memory_that_ran_out_after_the_checkpoint_is_known_from_run_json(
    shared_runs: SharedRuns,
    tmp_path: Path,
) -> None:
    settings = shared_runs.copy(tmp_path, killed_at=6)  # the newest checkpoint is that of step 4
    facts = facts_of(tmp_path / "run")
    ((_, _, tokens),) = facts["micro_batch_tokens"]
    facts["micro_batch_tokens"].append([5, "training", tokens // 2])
    (tmp_path / "run/run.json").write_text(json.dumps(add_checksum(facts)))
    again, _ = train(settings)
    assert [again.state.budget.at(step, "training") for step in (4, 5, 8)] == [
        tokens,
        tokens // 2,
        tokens // 2,
    ]


def test_a_number_of_the_log_that_has_changed_is_named(
    shared_runs: SharedRuns,
    tmp_path: Path,
) -> None:
    settings = shared_runs.copy(tmp_path, killed_at=6)
    log = tmp_path / "run/metrics.jsonl"
    replace(log, '"step": 2', '"step": 1')
    _, message = train(settings)
    assert message.replace("\n", "").count(f"{log}:") == 1
    assert [row["step"] for row in records(tmp_path / "run")][-1] == 9


def test_the_log_says_which_line_has_changed(tmp_path: Path) -> None:
    path, events = tmp_path / "m.jsonl", list[str]()
    sink = JsonlSink(path)
    for step in range(4):
        sink.log({"step": step})
    state = sink.state_dict()
    sink.close()
    replace(path, '{"step": 2}', "{'step': 2}")
    again = JsonlSink(path, events.append)
    again.load_state_dict(state)
    assert [re.match(r".*m.jsonl:3: ", item) is not None for item in events] == [True]
    again.log({"step": 4})
    again.load_state_dict(again.state_dict())
    again.close()
    assert len(events) == 1
    assert path.read_text().count("\n") == 5


@pytest.mark.slow
def test_completions_from_before_training_that_have_changed_are_not_compared(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["run"]["samples"] = {"prompts": 2, "max_new_tokens": 4}
    killed(settings, 6)
    samples = tmp_path / "run/samples.json"
    before = json.loads(samples.read_text())[0]["before"]
    replace(samples, f'"before": {json.dumps(before, ensure_ascii=False)}', '"before": "another"')
    _, message = train(settings)
    assert message.count("samples.json") == 1
    assert "another" not in samples.read_text() or "after" not in json.loads(samples.read_text())[0]


# A run that is read


@pytest.fixture
def finished(shared_runs: SharedRuns, tmp_path: Path) -> Path:
    shared_runs.copy(tmp_path)
    return tmp_path / "run"


def test_a_recipe_that_has_changed_is_refused(finished: Path, tmp_path: Path) -> None:
    """Other settings would make another model of the same weights."""
    config = finished / "config.yaml"
    saved = config.read_text()
    replace(config, "alpha: 4", "alpha: 5") if "alpha: 4" in saved else replace(
        config, "rank: 2", "rank: 3"
    )
    for words in (["export", "RUN", "OUT"], ["sample", "RUN", "--prompt", "a"], ["train", "RUN"]):
        inputs = [
            {"RUN": str(finished), "OUT": str(tmp_path / "out")}.get(word, word) for word in words
        ]
        with raises_error("recipe-damaged", where=str(config)):
            invoke(*inputs)
    assert not (tmp_path / "out").exists()
    config.write_text(saved)
    assert config_of(finished) == config


def test_a_recipe_that_was_changed_on_purpose_is_read_without_its_last_line(finished: Path) -> None:
    config = finished / "config.yaml"
    replace(config, "log_every: 3", "log_every: 4")
    with raises_error("recipe-damaged", where=str(config)):
        config_of(finished)
    config.write_text("".join(config.read_text().splitlines(keepends=True)[:-1]))
    assert restore(finished).recipe.run.log_every == 4


@pytest.mark.parametrize("name", ["run.json", "audit.json"])
def test_facts_that_have_changed_are_not_written_into_a_model_card(
    name: str, finished: Path
) -> None:
    path = finished / name
    path.write_text(
        re.sub(r"(\d)", lambda digit: str((int(digit[1]) + 1) % 10), path.read_text(), count=1)
    )
    with raises_error("file-damaged", where=str(path)):
        restore(finished)


def test_a_place_that_has_changed_is_not_gone_to(finished: Path) -> None:
    assert place_of_run(finished)[1] == Path.cwd()
    replace(finished / "run.json", f'"cwd": "{Path.cwd()}', '"cwd": "/tmp')
    assert place_of_run(finished)[1] is None
    (line,) = list_runs(finished)
    assert line.state == "unreadable"


DAMAGE: dict[str, Callable[[Path], None]] = {
    "run.json": lambda path: replace(path, '"steps": 9', '"steps": 8'),
    "audit.json": lambda path: replace(path, '"train"', '"trajn"'),
    "config.yaml": lambda path: replace(path, "log_every: 3", "log_every: 2"),
    "eval/step-0.json": lambda path: replace(path, '"step": 0', '"step": 1'),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_report_names_a_file_that_has_changed(name: str, finished: Path) -> None:
    assert RunRecord.read(finished).problems == ()
    DAMAGE[name](finished / name)
    assert [Path(name).name in problem for problem in RunRecord.read(finished).problems] == [True]
