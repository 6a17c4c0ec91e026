"""Recipes written for files of rows: the method, the columns and the share that fit, and recipes
that `valence check` accepts.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.command import command, command_error, place
from tests.data.importers.test_open_webui import SIBLING, feedback, message
from tests.errors import check_error, raises_error
from valence.cli.common import data_file
from valence.config.load import LoadedRecipe, load_recipe
from valence.data.load import DataFile
from valence.jobs.write_recipe import MODEL, write_recipe
from valence.reports.verdict import rows_needed

__all__ = ["place"]

NUM_PROMPTS = 30
THUMBS = [
    {"prompt": f"question {i}", "completion": f"answer {i} {k}", "label": k == 0}
    for i in range(NUM_PROMPTS)
    for k in range(2)
]
SCORED = [
    {"prompt": row["prompt"], "completion": row["completion"], "score": 1 + i % 5}
    for i, row in enumerate(THUMBS)
]
PAIRS = [
    {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}
    for i in range(NUM_PROMPTS)
]
DEMONSTRATIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
RANKINGS = [
    {"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]], "scores": [1, 0]}
    for row in PAIRS
]
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(rows: Sequence[dict[str, Any]], name: str = "rows.jsonl") -> DataFile:
    with open(name, "w", newline="") as file:
        if name.endswith(".csv"):
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return DataFile(name)


def written(rows: Sequence[dict[str, Any]], **options: Any) -> LoadedRecipe:
    path = write_recipe(write(rows), Path("recipe.yaml"), **options).path
    return load_recipe(path)


CASES = {
    "thumbs": (THUMBS, "kto", None),
    "scores": (SCORED, "kto", "scores_to_judgements"),
    "pairs": (PAIRS, "dpo", None),
    "demonstrations": (DEMONSTRATIONS, "sft", None),
    "rankings": (RANKINGS, "grpo", None),
    "only thumbs up": (THUMBS[::2], "sft", "chosen_to_demonstrations"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_method_follows_from_the_rows(case: str) -> None:
    rows, method, convert = CASES[case]
    recipe = written(rows).recipe
    assert (recipe.method, recipe.data.convert) == (method, convert)
    assert (recipe.model.name, recipe.data.eval) == (MODEL, 0.1)
    assert recipe.model.lora is not None
    assert recipe.run.samples.prompts > 0
    assert recipe.data.train[0].keys == {}


def test_answers_with_complaints_are_not_imitated(place: Path) -> None:
    rows = [
        {"prompt": f"question {i}", "completion": f"answer {i}", "feedback": "too long"}
        for i in range(NUM_PROMPTS)
    ]
    path = place / "feedback.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_recipe(DataFile(str(path)), place / "words.yaml")
    recipe = load_recipe(place / "words.yaml").recipe
    assert recipe.method == "hindsight"
    assert recipe.run.keep_best is not None


def test_scores_are_divided_where_the_halves_are_most_alike() -> None:
    """From 3 on there are as many too many as from 4 on there are too few: the stricter one."""
    assert written(SCORED).recipe.data.threshold == 4
    Path("recipe.yaml").unlink()
    assert (
        written([row | {"score": min(row["score"], 2)} for row in SCORED]).recipe.data.threshold
        == 2
    )


@pytest.mark.parametrize(
    ("num_up", "num_down", "expected"),
    [(20, 20, "given"), (24, 20, "given"), (40, 20, "auto"), (10, 30, "auto")],
)
def test_unbalanced_thumbs_are_balanced(num_up: int, num_down: int, expected: str) -> None:
    rows = [
        {"prompt": f"question {i}", "completion": f"answer {i}", "label": i < num_up}
        for i in range(num_up + num_down)
    ]
    assert written(rows).recipe.loss["class_weights"] == expected


def test_method_and_model_may_be_named() -> None:
    recipe = written(THUMBS, method="dpo", model="owner/model: x").recipe
    assert recipe.model.name == "owner/model: x"
    assert (recipe.method, recipe.data.convert) == ("dpo", "judgements_to_pairs")
    Path("recipe.yaml").unlink()
    assert (
        "samples"
        not in Path(write_recipe(write(SCORED), Path("r.yml"), method="pointwise").path).read_text()
    )
    for method, rows, code in (
        ("dpo", DEMONSTRATIONS, "kind-mismatch"),
        ("kot", THUMBS, "method-unknown"),
        ("ppo", PROMPTS, "init-prompts"),
    ):
        with raises_error(code):
            write_recipe(write(rows), Path("other.yaml"), method=method)


NAMES = {"prompt": "question", "completion": "answer", "label": "thumb"}


def test_columns_are_mapped_where_they_have_other_names() -> None:
    rows = [{NAMES[name]: value for name, value in row.items()} for row in THUMBS]
    write(rows, "my: ratings.csv")
    write_recipe(DataFile("my: ratings.csv"), Path("recipe.yaml"))
    [file] = load_recipe("recipe.yaml").recipe.data.train
    assert (file.path, file.keys) == ("my: ratings.csv", NAMES)


@pytest.mark.parametrize(
    ("names", "cells", "keys"),
    [
        (("Question", "Answer", "Rating"), ("good", "bad"), "label"),
        (("question", "answer", "helpful"), ("yes", "no"), "label"),
        (("user_message", "bot_reply", "rating"), ("Good ", "bad"), "label"),
        (("message", "reply", "rating"), ("good", "bad"), "label"),
        (("message", "reply", "Rating"), ("4", "1"), "score"),
        (("prompt", "completion", "helpful"), ("True", "False"), "label"),
        (("prompt", "completion", "feedback"), ("good", ""), "label"),
        (("question", "answer", "thumb"), ("up", "downn"), "label"),
        (("question", "answer", "CSAT"), ("4", "1", "5", "2", "great"), "score"),
        (("question", "answer", "helpful"), ("helpful", "not helpful"), "label"),
    ],
)
def test_a_rating_under_another_name_is_read(
    names: tuple[str, str, str], cells: tuple[str, ...], keys: str
) -> None:
    prompt, answer, rating = names
    rows = [
        {prompt: f"question {i}", answer: f"answer {i}", rating: cells[i % len(cells)]}
        for i in range(40)
    ]
    write(rows, "rows.csv")
    write_recipe(DataFile("rows.csv"), Path("recipe.yaml"))
    recipe = load_recipe("recipe.yaml").recipe
    assert recipe.data.train[0].keys[keys] == rating
    assert (recipe.method == "kto") is (cells[1] not in ("", "downn"))


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("instruction", "good_answer", "bad_answer"),
        ("question", "good", "bad"),
        ("prompt", "chosen_response", "rejected_response"),
        ("Question", "Better", "Worse"),
    ],
)
def test_pairs_under_other_names_are_read(prompt: str, chosen: str, rejected: str) -> None:
    rows = [{prompt: f"q {i}", chosen: f"good {i}", rejected: f"bad {i}"} for i in range(40)]
    write(rows, "rows.csv")
    write_recipe(DataFile("rows.csv"), Path("recipe.yaml"))
    assert load_recipe("recipe.yaml").recipe.method == "dpo"


@pytest.mark.parametrize(
    ("column", "cells", "method"),
    [
        ("CSAT", ("4", "1", ""), "kto"),
        ("CSAT", ("Happy", "Unhappy"), "kto"),
        ("Problem solved?", ("yes", "no"), "kto"),
        ("Survey result", ("1", "2", "5"), "init-rating"),
        ("outcome", ("ok", "escalated"), "init-rating"),
        ("Survey result", ("yes", "no"), "init-rating"),
        ("topic", ("bill", "parcel", "login"), "sft"),
        ("tokens", ("12", "480", "77"), "sft"),
        ("feedback", ("too long", "fine", "polite"), "hindsight"),
        ("Ticket ID", None, "sft"),
    ],
)
def test_a_rating_that_is_not_read_is_asked_about(
    column: str, cells: tuple[str, ...] | None, method: str
) -> None:
    rows = [
        {
            "Customer message": f"question {i}",
            "Agent reply": f"answer {i}",
            column: cells[i % len(cells)] if cells else f"T-{i}",
        }
        for i in range(60)
    ]
    write(rows, "tickets.csv")
    if method != "init-rating":
        write_recipe(DataFile("tickets.csv"), Path("recipe.yaml"))
        assert load_recipe("recipe.yaml").recipe.method == method
        return
    for other in (None, "kto"):
        with raises_error("init-rating", where="tickets.csv", fix="--method sft") as raised:
            write_recipe(DataFile("tickets.csv"), Path("recipe.yaml"), method=other)
    words = shlex.split((raised.error.fix or "").split("`")[1])
    assert words[:2] == ["valence", "init"]
    assert data_file(words[2]).keys.keys() >= {"prompt", "completion"}
    write_recipe(DataFile("tickets.csv"), Path("recipe.yaml"), method="sft")


def test_rows_with_prompts_alone_name_the_columns_that_are_not_read() -> None:
    rows = [{"prompt": f"q {i}", "first": f"a {i}", "second": f"b {i}"} for i in range(40)]
    with raises_error("init-prompts", fix="valence init") as raised:
        write_recipe(write(rows), Path("recipe.yaml"))
    assert "'first', 'second'" in raised.error.message


def test_a_recipe_in_another_folder_finds_the_file() -> None:
    Path("recipes").mkdir()
    write_recipe(write(THUMBS), Path("recipes/mine.yaml"))
    loaded = load_recipe("recipes/mine.yaml")
    assert Path(loaded.recipe.data.train[0].path).resolve() == Path("rows.jsonl").resolve()
    assert loaded.recipe.run.dir == "runs/mine"


def test_few_rows_get_a_larger_share_or_none() -> None:
    few = THUMBS[:10]
    recipe = written(few).recipe
    assert isinstance(recipe.data.eval, float)
    Path("recipe.yaml").unlink()
    recipe = written(THUMBS[:4]).recipe
    assert (recipe.data.eval, recipe.run.samples.prompts) == ([], 0)


def test_enough_rows_for_a_verdict_are_held_out_where_there_are_enough() -> None:
    many = [
        {"prompt": f"question {i}", "completion": "answer", "label": i % 2 == 0} for i in range(200)
    ]
    share = written(many).recipe.data.eval
    assert share == 0.4
    assert isinstance(share, float)
    assert share * 200 >= rows_needed(0.5) > 0.3 * 200
    Path("recipe.yaml").unlink()
    assert written(many * 6).recipe.data.eval == 0.1


def test_rows_that_cannot_be_used_are_skipped_and_named() -> None:
    bad = {"prompt": "q", "completion": "a", "label": "perhaps"}
    write([*THUMBS, bad])
    result = write_recipe(DataFile("rows.jsonl"), Path("recipe.yaml"))
    assert [row.origin.line for row in result.facts.bad] == [61]
    assert load_recipe(result.path).recipe.data.on_bad_row == "skip"
    assert "rows.jsonl:61" in result.path.read_text()
    mixed = write_recipe(write([*THUMBS, *PAIRS]), Path("mixed.yaml"))
    assert (mixed.method, len(mixed.facts.bad)) == ("kto", len(PAIRS))
    with raises_error("row-label-invalid", where="rows.jsonl:1"):
        write_recipe(write([bad]), Path("other.yaml"))


def test_a_file_of_which_most_rows_cannot_be_used_gets_no_recipe() -> None:
    write([{**row, "label": row["label"] if i % 3 == 0 else "4"} for i, row in enumerate(THUMBS)])
    with raises_error("row-label-invalid", where="rows.jsonl:2"):
        write_recipe(DataFile("rows.jsonl"), Path("recipe.yaml"))
    assert not Path("recipe.yaml").exists()


def test_what_no_recipe_can_be_written_for() -> None:
    with raises_error("init-prompts", fix="valence init --recipe online_grpo"):
        write_recipe(write(PROMPTS), Path("recipe.yaml"))
    for method in ("distill", "online_distill"):
        with raises_error("init-teacher", fix="valence init --recipe distill"):
            write_recipe(write(PROMPTS), Path("recipe.yaml"), method=method)
    with raises_error("file-not-found"):
        write_recipe(DataFile("missing.jsonl"), Path("recipe.yaml"))
    with raises_error("format-unknown-columns"):
        write_recipe(write([{"x": "a", "y": "b"}]), Path("recipe.yaml"))
    assert not Path("recipe.yaml").exists()


def export(**vote: Any) -> list[dict[str, Any]]:
    """An export of Open WebUI: a thumb up and one down to a regeneration, so also a pair."""
    question = message("m1", None, "user", "How long does rice boil?")
    turns = [question, message("m2", "m1", "assistant", "12 minutes"), SIBLING]
    votes: list[dict[str, Any]] = []
    for i in range(NUM_PROMPTS):
        question["content"] = f"question {i}"
        for rating, rated in ((1, "m2"), (-1, "m3")):
            row = feedback(deepcopy(turns), rating, id=f"f{i}{rated}", rated=rated)
            row["meta"]["chat_id"] = row["snapshot"]["chat"]["id"] = f"c{i}"
            votes.append(row | vote)
    return votes


@pytest.mark.parametrize("format", [None, "open-webui", "open_webui"])
def test_a_recipe_reads_an_export_itself(format: str | None) -> None:
    Path("export.json").write_text(json.dumps(export()))
    file = DataFile("export.json", format=format)
    written = write_recipe(file, Path("recipe.yaml"))
    recipe = load_recipe(written.path).recipe
    assert (recipe.method, recipe.data.convert, recipe.data.eval) == ("kto", None, 0.1)
    assert recipe.data.train[0].format in ("open_webui", "open-webui")
    assert written.facts.counts == {"thumbs up": NUM_PROMPTS, "thumbs down": NUM_PROMPTS}
    assert written.facts.others == {"preferences": NUM_PROMPTS}
    assert f"not used: {NUM_PROMPTS} preferences" in written.path.read_text()
    Path("recipe.yaml").unlink()
    written = write_recipe(file, Path("recipe.yaml"), method="dpo")
    assert load_recipe(written.path).recipe.data.convert is None
    assert written.facts.counts == {"preferences": NUM_PROMPTS}


def test_an_export_without_a_usable_vote_says_why() -> None:
    Path("export.json").write_text(json.dumps(export(snapshot=None)))
    with raises_error(
        "no-usable-rows", where="export.json:1", fix="valence import open-webui export.json"
    ) as raised:
        write_recipe(DataFile("export.json"), Path("recipe.yaml"))
    assert "conversation is not in the export" in str(raised.error)
    assert not Path("recipe.yaml").exists()


def test_nothing_is_overwritten() -> None:
    Path("recipe.yaml").write_text("mine")
    with raises_error("path-exists", where="recipe.yaml", fix="--out"):
        write_recipe(write(THUMBS), Path("recipe.yaml"))
    assert Path("recipe.yaml").read_text() == "mine"
    with raises_error("path-invalid-output"):
        write_recipe(write(THUMBS), Path("recipe.json"))
    assert sorted(path.name for path in Path().iterdir()) == ["recipe.yaml", "rows.jsonl"]


@pytest.mark.parametrize("case", CASES)
def test_check_accepts_the_recipe(
    place: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(CASES[case][0])
    assert command("init", "rows.jsonl", "--model", "./model", "--out", "new.yaml") == 0
    assert "valence check new.yaml" in capsys.readouterr().out
    assert command("check", "new.yaml") == 0
    error = command_error("init", "rows.jsonl", "--out", "new.yaml")
    check_error(error, "path-exists")
