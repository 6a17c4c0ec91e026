"""`valence report`, as a user types it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.command import command, command_error
from tests.disk import full_disk
from tests.errors import check_error


def a_run(folder: Path, auc: float = 0.5) -> Path:
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text("method: kto\nmodel: {name: org/tiny-chat}\n")
    results = {"step": 2, "metrics": {"rewards/auc": auc}, "rows": [{"id": "a", "reward": auc}]}
    (folder / "eval/step-2.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n')
    (folder / "run.json").write_text(
        json.dumps({"status": "done", "method": "kto", "steps": 2, "total_steps": 2})
    )
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three runs, which is the current one."""
    for name in ("runs/first", "runs/second", "other/first"):
        a_run(tmp_path / name, 0.6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*words: str) -> int:
    return command("report", *words)


def test_one_run_has_its_page_written_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("runs/first") == 0
    assert capsys.readouterr().out == "runs/first/report.html\n"
    assert "org/tiny-chat" in (place / "runs/first/report.html").read_text()
    assert not (place / "comparison.html").exists()


def test_a_folder_that_holds_one_run_stands_for_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("other") == 0
    assert capsys.readouterr().out == "other/first/report.html\n"


def test_the_page_of_one_run_can_be_had_elsewhere_too(place: Path) -> None:
    for _ in range(2):  # what it wrote it may write over
        assert report("runs/first", "--out", "page.html") == 0
    assert (
        (place / "page.html").read_text().startswith((place / "runs/first/report.html").read_text())
    )


def test_several_runs_are_compared_by_names_that_tell_them_apart(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("runs", "other/first") == 0
    assert capsys.readouterr().out == "comparison.html\n"
    page = (place / "comparison.html").read_text()
    assert "runs/first, second, other/first" in page
    assert report("runs", "--out", "mine.html") == 0
    assert "first, second" in (page := (place / "mine.html").read_text())
    assert "other/first" not in page


def test_markdown_is_printed_or_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("runs", "--md") == 0
    assert "| first | kto | done |" in capsys.readouterr().out
    assert report("runs/first", "--md") == 0
    assert "**kto**" in capsys.readouterr().out
    assert not (place / "runs/first/report.html").exists()
    assert report("runs", "--md", "--out", "compared.md") == 0
    assert capsys.readouterr().out == "compared.md\n"
    assert "| first | kto | done |" in (place / "compared.md").read_text()
    assert sorted(path.name for path in place.iterdir()) == ["compared.md", "other", "runs"]


def test_what_lies_there_already_is_not_written_over(place: Path) -> None:
    (place / "comparison.html").write_text("mine")
    for words in (("runs",), ("runs/first", "--out", "comparison.html")):
        check_error(command_error("report", *words), "path-exists", where="comparison.html")
    assert (place / "comparison.html").read_text() == "mine"


@pytest.mark.parametrize(("words", "code"), [
    (("nowhere",), "run-not-found"),
    (("runs", "empty"), "run-not-found"),
    (("runs", "file"), "path-is-file"),
])  # fmt: skip
def test_what_is_no_run_is_refused(place: Path, words: tuple[str, ...], code: str) -> None:
    (place / "empty").mkdir()
    (place / "file").write_text("")
    check_error(command_error("report", *words), code, where=words[-1])
    assert not (place / "comparison.html").exists()


def test_a_folder_that_cannot_be_written_to_is_named() -> None:
    for words, where in ((("runs/first",), "runs/first"), (("runs",), "comparison.html")):
        with full_disk():
            error = command_error("report", *words)
        check_error(error, "file-not-writable", where=where)
        assert os.strerror(errno.EFBIG) in error.message
