"""What held-out rows can show: warnings before training where rows are missing for a verdict, and
no verdict from rows that are also trained on.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.training.test_held_out_share import folder, model, recipe, write
from valence.config.load import load_recipe
from valence.reports.run_record import RunRecord
from valence.reports.verdict import outputs, rows_needed, run_verdict
from valence.training.prepare import held_out_warning, prepare

__all__ = ["folder", "model"]

Rows = list[dict[str, Any]]


def rated(count: int, *, share_up: float = 0.5, name: str = "held out") -> Rows:
    return [
        {"prompt": f"{name} {i}", "completion": f"answer {i}", "label": i < share_up * count}
        for i in range(count)
    ]


def preferred(count: int) -> Rows:
    return [{"prompt": f"q {i}", "chosen": f"a {i}", "rejected": f"b {i}"} for i in range(count)]


def warning_of(model: str, rows: Rows | None, **sections: Any) -> str | None:
    data: dict[str, Any] = {"eval": []}
    if rows is not None:
        write("held_out.jsonl", rows)
        data["eval"] = "held_out.jsonl"
    data |= sections.pop("data", {})
    return held_out_warning(prepare(load_recipe(recipe(model, data=data, **sections))))


def trained_rows() -> Rows:
    return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]


def test_too_few_rows_are_a_warning_that_names_how_many_are_needed(model: str) -> None:
    needed = rows_needed(0.5)
    assert warning_of(model, rated(needed)) is None
    few = warning_of(model, rated(needed - 2))
    assert few is not None
    assert str(needed) in few
    assert warning_of(model, rated(needed), eval={"max_examples": 4}) is not None
    # an unequal share of thumbs needs more rows
    assert warning_of(model, rated(needed, share_up=0.1)) is not None


def test_the_warning_names_a_share_that_holds_out_enough_rows(model: str) -> None:
    write("rows.jsonl", rated(200))
    settings = recipe(model, data={"train": "rows.jsonl", "eval": 0.1})
    prepared = prepare(load_recipe(settings))
    few = held_out_warning(prepared)
    assert few is not None
    [share] = re.findall(r"data\.eval: (0\.\d)", few)
    assert float(share) * 200 >= rows_needed(0.5)


def test_rows_that_can_show_nothing_are_a_warning(model: str) -> None:
    none, up, trained = (
        warning_of(model, None),
        warning_of(model, rated(99, share_up=1)),
        warning_of(model, trained_rows()),
    )
    assert none is not None
    assert up is not None
    assert trained is not None
    assert len({none, up, trained}) == 3
    assert warning_of(model, [*trained_rows(), *rated(rows_needed(0.5))]) is None


def test_pairs_have_their_own_number(model: str) -> None:
    write("pairs.jsonl", preferred(8))
    sections = {"method": "dpo", "data": {"train": "pairs.jsonl"}}
    assert warning_of(model, preferred(rows_needed(None) + 8), **sections) is None
    few = warning_of(model, preferred(rows_needed(None) + 7), **sections)
    assert few is not None  # 8 of them are trained on
    assert str(rows_needed(None)) in few


@pytest.mark.parametrize("num_new", [0, 40])
def test_rows_that_are_trained_on_do_not_count(model: str, num_new: int) -> None:
    write("held_out.jsonl", [*trained_rows(), *rated(num_new)])
    settings = recipe(model, data={"eval": "held_out.jsonl"}, run={"dir": "run"})
    valence.train(settings, quiet=True)
    run = RunRecord.read(Path("run"))
    assert run.last is not None
    marked = [row for row in run.last["rows"] if row.get("in_train")]
    assert len(marked) == len(trained_rows())
    verdict = run_verdict(run)
    assert verdict.count == num_new
    assert (verdict.state == "unmeasured") is (num_new == 0)
    assert str(len(marked)) in verdict.sentence
    # the card says the same
    assert verdict.sentence.split(" (")[0] in Path("run/model/README.md").read_text()


def test_a_run_ends_with_its_verdict_a_warning_and_a_command(model: str) -> None:
    rows = trained_rows()
    write("held_out.jsonl", rows)
    valence.train(recipe(model, data={"eval": "held_out.jsonl"}, run={"dir": "run"}), quiet=True)
    lines = outputs(Path("run"))
    assert lines[0].startswith("Not measured")
    assert lines[-2].startswith("Warning: ")
    assert str(len(rows)) in lines[-2]  # they are trained on, which outweighs other warnings
    assert lines[-1].startswith("Next: valence sample run --prompt ")


def test_a_run_without_held_out_rows_ends_with_how_to_hold_out_some(model: str) -> None:
    valence.train(recipe(model, data={"eval": []}, run={"dir": "run"}), quiet=True)
    assert "data.eval" in outputs(Path("run"))[-1]


def test_the_next_command_asks_a_question_as_it_was_trained(model: str) -> None:
    chat = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Where is my parcel?"},
    ]
    write("chats.jsonl", [{"prompt": chat, "completion": f"It is in {i}."} for i in range(4)])
    settings = recipe(
        model,
        method="sft",
        data={"train": "chats.jsonl", "eval": "chats.jsonl"},
        run={"dir": "run"},
    )
    valence.train(settings, quiet=True)
    assert shlex.split(outputs(Path("run"))[-1]) == [
        *("Next:", "valence", "sample", "run", "--system", "You answer briefly."),
        *("--prompt", "Where is my parcel?", "--temperature", "0"),
    ]
