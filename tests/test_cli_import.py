"""`valence import`: what it prints, and what programs get."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.command import command as valence
from tests.command import command_error
from tests.errors import check_error
from tests.jobs.chat_log import chat_log, entry, write_export
from valence import completion
from valence.data.importers.records import SKIP_REASONS, ReadOptions
from valence.data.importers.sources import SOURCES
from valence.data.load import DataFile, load
from valence.types import Chat

__all__ = ["chat_log"]

pytestmark = pytest.mark.usefixtures("chat_log")

LOG = (entry(1), entry(2, False), entry(3), entry(4, None), entry(5, None, better="better"))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_export(Path("log.jsonl"), *LOG)
    return tmp_path


def test_the_summary_counts_read_written_and_skipped_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert valence("import", "chat-log", "log.jsonl") == 0
    shown = capsys.readouterr().out
    assert "4 votes read: 4 new, 0 replaced, 0 unchanged" in shown
    table = shown[shown.index("file ") :].partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[:3] for line in table if line.startswith("feedback.")] == [
        ["feedback.jsonl", "3", "thumbs"],
        ["feedback.pairs.jsonl", "1", "pairs"],
        ["feedback.demonstrations.jsonl", "1", "demonstrations"],
    ]
    assert f"1  {SKIP_REASONS['no_vote']}  log.jsonl:4 (answer 4)" in shown
    assert "2 up, 1 down" in shown
    assert "tiny 100%" in shown
    assert "valence init feedback.jsonl" in shown
    assert "valence init feedback.pairs.jsonl --out pairs.yaml" in shown
    assert valence("import", "chat_log", "log.jsonl") == 0
    assert "4 votes read: 0 new, 0 replaced, 4 unchanged" in capsys.readouterr().out
    write_export(Path("log.jsonl"), entry(9))
    assert valence("import", "chat_log", "log.jsonl") == 0
    assert "1 vote read: 1 new, 0 replaced, 0 unchanged" in capsys.readouterr().out


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("import", "chat-log", "log.jsonl", "--out", "a.jsonl", "--quiet") == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert Path("a.jsonl").exists()


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("import", "chat-log", "log.jsonl", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["votes"], result["counts"]["new"]) == ("done", 4, 4)
    assert result["skipped"] == {
        "no_vote": {"count": 1, "place": "log.jsonl:4", "example": "answer 4"}
    }
    assert {file["path"]: file["rows"] for file in result["files"]} == {
        "feedback.jsonl": 3,
        "feedback.pairs.jsonl": 1,
        "feedback.demonstrations.jsonl": 1,
    }


def test_json_reports_why_nothing_was_imported(capsys: pytest.CaptureFixture[str]) -> None:
    error = command_error("import", "chat-log", "log.jsonl", "--model", "large", "--json")
    check_error(error, "nothing-imported", where="log.jsonl", fix="--model")
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["code"]) == ("failed", "nothing-imported")


def test_options_reach_the_reader(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)
    for name in ("one", "two"):
        (place / name).touch()
    (place / "recorder.py").write_text(
        "requests = []\ndef read(*request):\n    requests.append(request)\n    return []\n"
    )
    words = (
        "--prompt a.b --completion c --left l --right r --correction d --label v "
        "--score-name x --score-name y --category good=up --category so=so=down "
        "--include-machine --keep-reasoning --unlabelled"
    )
    command_error("import", "recorder:read", "one", "two", *words.split())
    assert import_module("recorder").requests == [
        (
            ["one", "two"],
            ReadOptions(
                paths={
                    "prompt": "a.b",
                    "completion": "c",
                    "left": "l",
                    "right": "r",
                    "correction": "d",
                    "label": "v",
                },
                score_names=("x", "y"),
                labels={"good": True, "so=so": False},
                includes_machine=True,
                keeps_reasoning=True,
                includes_unlabelled=True,
            ),
        )
    ]


def test_options_of_other_tools_are_refused() -> None:
    words = "import", "open-webui", "log.jsonl", "--score-name", "x", "--score-name", "y"
    check_error(command_error(*words), "option-unused", where="--score-name", fix="langfuse")
    assert not Path("feedback.jsonl").exists()


IMPORTER = """
import json
import valence

def read(paths, options):
    for path in paths:
        with open(path) as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                yield valence.Vote(
                    source="helpdesk", id=row["id"], updated_at=row["at"], label=row["vote"],
                    prompt=({"role": "user", "content": row["question"]},),
                    completion={"role": "assistant", "content": row["answer"]},
                    origin=valence.Origin(path, number),
                )

def one(row):
    return {"prompt": row["question"], "completion": row["answer"], "label": row["vote"]}

limit = 3
"""


def test_an_importer_has_an_import_path(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (place / "desk_tools.py").write_text(IMPORTER)
    votes = [entry(number, number % 2 == 0) for number in range(6)]
    write_export(Path("desk.jsonl"), *votes)
    words = ("import", "desk_tools:read", "desk.jsonl")
    assert valence(*words) == 0
    assert "6 votes read: 6 new" in capsys.readouterr().out
    assert valence(*words, "--since", "last", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["skipped"]["before_since"]["count"] == 5
    write_export(Path("desk.jsonl"), *votes[:4])
    assert valence(*words, "--complete", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["total"], summary["counts"]["withdrawn"]) == (4, 2)


def test_a_recipe_names_an_importer_by_its_import_path(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (place / "desk_formats.py").write_text(IMPORTER)
    write_export(Path("desk.jsonl"), *[entry(number, number % 2 == 0) for number in range(6)])
    loaded = [
        load([DataFile("desk.jsonl", format=f"desk_formats:{name}")], "judgement")
        for name in ("read", "one")
    ]
    prompts = [[example.prompt for example in part.examples] for part in loaded]
    texts = [f"question {number}" for number in range(6)]
    assert prompts == [[Chat(({"role": "user", "content": text},)) for text in texts], texts]


@pytest.mark.parametrize(("target", "code", "fix"), [
    ("wrong_tools:raed", "importer-not-found", "read"),
    ("no_such_tools:read", "importer-module-not-found", ""),
    ("wrong_tools:one", "importer-failed", ""),
    ("wrong_tools:limit", "importer-failed", ""),
])  # fmt: skip
def test_an_import_path_without_an_importer_is_refused(
    target: str, code: str, fix: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (place / "wrong_tools.py").write_text(IMPORTER)
    check_error(command_error("import", target, "log.jsonl"), code, fix=fix)
    assert not Path("feedback.jsonl").exists()


@pytest.mark.parametrize("category", ["good", "good=yes", "=up"])
def test_a_category_is_up_or_down(category: str) -> None:
    error = command_error("import", "chat-log", "log.jsonl", "--category", category)
    check_error(error, "category-invalid", where="--category")


def test_a_source_must_be_named() -> None:
    check_error(command_error("import"), "import-input", fix="--list")
    check_error(command_error("import", "chat-log"), "import-input")
    error = command_error("import", "chat-log", "log.jsonl", "--token-env", "KEY")
    check_error(error, "option-unused", where="--token-env", fix="--url")


def test_the_list_has_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("import", "--list") == 0
    shown = capsys.readouterr().out
    names = {line.split()[0] for line in shown.splitlines() if line[:1].strip()}
    assert {name.replace("_", "-") for name in SOURCES} <= names


def test_a_shell_completes_sources() -> None:
    assert [name for name, _ in completion.feedback_sources("lang")] == ["langfuse", "langsmith"]
