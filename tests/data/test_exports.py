"""Exports of feedback tools as files of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import Source, write
from tests.errors import raises_error
from tests.jobs.chat_log import NAME, chat_log, entry, write_export
from valence.data.format_table import FORMATS
from valence.data.importers.sources import (
    SOURCES,
    detect_source,
    is_source,
    read_votes,
)
from valence.data.load import Loaded, fitting_mapping, load, read_sources, stream
from valence.data.sources import Row
from valence.types import Demonstration, Example, Judgement, Kind, Origin, Preference, Prompt

__all__ = ["chat_log"]

pytestmark = pytest.mark.usefixtures("chat_log")

LOG = (
    entry(1, comment="good"),
    entry(2, False),
    entry(3, None),
    entry(4, None, score=4.0),
    entry(5, None, other="other 5", winner="other"),
    entry(6, None, better="better 6"),
    entry(7, machine=True),
)
TABLE = dict(SOURCES)
"""Without the tool of the tests."""
LEFT_OUT = {"records without a vote": 1, "scores of a model or program, which are not feedback": 1}


def read_log(
    folder: Path,
    kind: Kind,
    *log: dict[str, Any],
    source: dict[str, Any] | None = None,
    **options: Any,
) -> Loaded:
    file = write_export(folder / "log.jsonl", *(log or LOG))
    return load([Source(file, **{"format": NAME, **(source or {})})], kind, **options)


def lines(loaded: Loaded) -> list[int]:
    return [e.origin.line for e in loaded.examples]


@pytest.mark.parametrize(
    ("kind", "type_of_example", "expected"),
    [
        ("judgement", Judgement, [1, 2]),
        ("scored", Judgement, [4]),
        ("preference", Preference, [5, 6]),
        ("demonstration", Demonstration, [6]),
        ("prompt", Prompt, [1, 2, 4, 5, 6]),
    ],
)
def test_a_method_reads_the_rows_of_its_kind(
    kind: Kind, type_of_example: type[Example], expected: list[int], tmp_path: Path
) -> None:
    loaded = read_log(tmp_path, kind)
    assert {type(e) for e in loaded.examples} == {type_of_example}
    assert lines(loaded) == expected
    (file,) = loaded.files
    assert (file.path, file.format) == (str(tmp_path / "log.jsonl"), NAME)
    assert (file.rows, file.examples, file.bad) == (len(expected) + 2, len(expected), 0)
    assert dict(file.unused) == LEFT_OUT
    assert [origin.line for origin, _ in loaded.unused] == [3, 7]


def test_an_example_has_the_rating_without_the_rater(tmp_path: Path) -> None:
    first = read_log(tmp_path, "judgement").examples[0]
    assert isinstance(first, Judgement)
    assert (first.label, first.info["comment"], first.info["votes"]) == (True, "good", ["v1"])
    assert "person" not in json.dumps(dict(first.info))


def test_thumbs_are_scored_rows_where_there_are_no_scores(tmp_path: Path) -> None:
    assert lines(read_log(tmp_path, "scored", entry(1), entry(2, False))) == [1, 2]


def test_a_conversion_takes_rows_of_another_kind(tmp_path: Path) -> None:
    loaded = read_log(tmp_path, "judgement", convert="scores_to_judgements", threshold=3.0)
    assert lines(loaded) == [1, 2, 4]
    loaded = read_log(tmp_path, "scored", convert="scores_to_judgements", threshold=3.0)
    assert lines(loaded) == [1, 2, 4]
    loaded = read_log(tmp_path, "judgement", convert="pairs_to_judgements")
    assert lines(loaded) == [1, 2, 5, 5, 6, 6]


def test_weight_and_limit_of_a_file_hold_for_its_rows(tmp_path: Path) -> None:
    loaded = read_log(tmp_path, "judgement", source={"weight": 2.0, "limit": 1})
    assert [(e.origin.line, e.weight) for e in loaded.examples] == [(1, 2.0)]


def test_names_may_have_hyphens(tmp_path: Path) -> None:
    assert read_log(tmp_path, "judgement", source={"format": "chat-log"}).files[0].format == NAME


def test_files_of_one_tool_are_read_together(tmp_path: Path) -> None:
    """A later vote in another file replaces one in the first."""
    first = write_export(tmp_path / "first.jsonl", entry(1), entry(2))
    second = write_export(tmp_path / "second.jsonl", entry(1, False, at=5000))
    loaded = load([Source(first, format=NAME), Source(second, format=NAME)], "judgement")
    assert {e.origin: e.label for e in loaded.examples if isinstance(e, Judgement)} == {
        Origin(second, 1): False,
        Origin(first, 2): True,
    }


def test_other_files_may_be_combined_with_an_export(tmp_path: Path) -> None:
    log = write_export(tmp_path / "log.jsonl", *LOG)
    plain = write(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b", "label": True})
    loaded = load([Source(plain), Source(log, format=NAME)], "judgement")
    assert {file.path: file.format for file in loaded.files} == {plain: "judgement", log: NAME}


def test_an_export_without_rows_of_the_kind_reports_the_reason(tmp_path: Path) -> None:
    with raises_error("no-usable-rows", where="log.jsonl") as raised:
        read_log(tmp_path, "judgement", entry(1, None), entry(2, None))
    assert "without a vote" in raised.error.message


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ({"keys": {"chosen": "a"}}, "keys-unknown-column"),
        ({"split": "train"}, "split-not-a-hub-dataset"),
        ({"format": "chat_lgo"}, "format-unknown"),
    ],
)
def test_settings_that_an_export_does_not_have_are_refused(
    source: dict[str, Any], code: str, tmp_path: Path
) -> None:
    with raises_error(code, where="log.jsonl"):
        read_log(tmp_path, "judgement", source=source)


def test_the_rows_can_be_looked_at_and_scored(tmp_path: Path) -> None:
    source = Source(write_export(tmp_path / "log.jsonl", *LOG), format=NAME, limit=3)
    observed = list(read_sources([source]))
    assert [row.value["completion"] for row in observed if isinstance(row, Row)] == [
        "answer 1",
        "answer 2",
        "answer 4",
    ]
    pairs = list(stream(source))
    assert [row for row, _ in pairs] == observed
    assert [example.origin.line for _, example in pairs] == [1, 2, 4]


def test_an_export_that_is_not_named_is_recognized(tmp_path: Path) -> None:
    file = write_export(tmp_path / "log.jsonl", *LOG)
    with raises_error("format-unknown-columns", where="log.jsonl", fix=f"format: {NAME}"):
        load([Source(file)], "judgement")


def test_an_export_of_open_webui_is_recognized() -> None:
    row = {"id": "f1", "data": {"rating": 1}, "meta": {"message_id": "m"}, "snapshot": {"chat": {}}}
    assert detect_source([{"a": 1}, row]) == "open_webui"
    assert detect_source([{"prompt": "a", "completion": "b", "label": True}]) is None


def test_the_format_of_an_export_applies_to_other_exports_only(
    tmp_path: Path,
) -> None:
    plain = write(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b", "label": True})
    log = Source(write_export(tmp_path / "log.jsonl", *LOG), format=NAME)
    newer = write_export(tmp_path / "newer.jsonl", entry(8))
    assert fitting_mapping(Source(plain), [log]) is None
    assert fitting_mapping(Source(newer), [log]) == (NAME, {})


def test_names_of_sources_are_no_formats() -> None:
    assert not set(SOURCES) & set(FORMATS)
    assert all(is_source(name.replace("_", "-")) for name in SOURCES)
    assert not any(map(is_source, (None, *FORMATS)))


def test_rows_that_need_no_import_are_named(tmp_path: Path) -> None:
    plain = write(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b", "label": True})
    with raises_error("import-not-an-export", where="rows.jsonl:1", fix="data.train") as raised:
        list(read_votes("open-webui", [plain]))
    assert "judgement" in str(raised.error.fix)
