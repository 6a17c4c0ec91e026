"""A file divided into two of the same format, by the rule of ``data.eval``."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import command, command_error
from tests.errors import check_error, raises_error
from valence.data.load import DataFile, load, load_split
from valence.data.sources import BadRow, read_rows
from valence.data.split import PromptSplit
from valence.jobs.split_rows import split_rows

SPLIT = PromptSplit(0.3)
ROWS: list[dict[str, Any]] = [
    {"question": f"question {i}\n, really?", "answer": f"answer {i} {k}", "thumb": "up"}
    for k in range(2)
    for i in range(20)
]
HELD_OUT = [row for row in ROWS if SPLIT.is_held_out(row["question"])]
TRAIN = [row for row in ROWS if row not in HELD_OUT]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_csv(path: str, delimiter: str = ",", rows: list[dict[str, Any]] = ROWS) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """With other spaces and escapes than json.dumps writes."""
    lines: list[str] = []
    for i, row in enumerate(rows):
        values = {"prompt": row["question"], "completion": row["answer"], "label": True}
        lines.append(f"{json.dumps(values, indent=None, separators=(' , ', ':'))}{' ' * (i % 3)}\n")
    return lines


@pytest.mark.parametrize(("name", "delimiter"), [("f.csv", ","), ("f.csv", ";"), ("f.tsv", "\t")])
def test_tables_keep_header_fields_and_lines(name: str, delimiter: str) -> None:
    write_csv(name, delimiter)
    summary = split_rows(DataFile(name), SPLIT)
    assert read_csv(summary.train, delimiter) == TRAIN
    assert read_csv(summary.held_out, delimiter) == HELD_OUT
    assert summary.num_rows == (len(TRAIN), len(HELD_OUT))
    assert summary.num_prompts == (len(TRAIN) // 2, len(HELD_OUT) // 2)
    assert (summary.train.suffix, summary.held_out.suffix) == (Path(name).suffix,) * 2
    header = Path(name).read_bytes().split(b"\r\n")[0]
    assert summary.held_out.read_bytes().startswith(header + b"\r\n")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_lines_are_copied_byte_by_byte(name: str) -> None:
    lines = lines_of(ROWS)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(name, "wt") as file:
        file.write("".join(lines).rstrip("\n"))
    summary = split_rows(DataFile(name), SPLIT, Path(f"t{name[4:]}"), Path(f"h{name[4:]}"))
    with opened(summary.train, "rt") as train, opened(summary.held_out, "rt") as held_out:
        assert train.read() == "".join(lines_of_side(lines, False))
        assert held_out.read() == "".join(lines_of_side(lines, True))


def lines_of_side(lines: list[str], is_held_out: bool) -> list[str]:
    sides = [SPLIT.is_held_out(row["question"]) for row in ROWS]
    lines = [*lines[:-1], f"{lines[-1].rstrip(chr(10))}\n"]
    return [line for line, side in zip(lines, sides, strict=True) if side is is_held_out]


def test_parquet_files_keep_their_schema() -> None:
    table = pa.table({name: [row[name] for row in ROWS] for name in ROWS[0]} | {"n": range(40)})
    pq.write_table(table, "rows.parquet")
    summary = split_rows(DataFile("rows.parquet"), SPLIT)
    parts = [pq.read_table(path) for path in (summary.train, summary.held_out)]
    assert [part.schema for part in parts] == [table.schema] * 2
    assert [part.num_rows for part in parts] == [len(TRAIN), len(HELD_OUT)]
    assert parts[1].column("question").to_pylist() == [row["question"] for row in HELD_OUT]


def test_the_rule_is_that_of_recipes() -> None:
    Path("rows.jsonl").write_text("".join(lines_of(ROWS)))
    summary = split_rows(DataFile("rows.jsonl"), SPLIT)
    parts = load_split([DataFile("rows.jsonl")], "judgement", SPLIT, where="data.eval")
    for path, part in zip((summary.train, summary.held_out), parts, strict=True):
        examples = load([DataFile(str(path))], "judgement").examples
        assert [e.id for e in examples] == [e.id for e in part.examples]


def test_files_that_exist_are_replaced_only_on_request() -> None:
    write_csv("f.csv")
    split_rows(DataFile("f.csv"), SPLIT)
    write_csv("f.csv", rows=[*ROWS, {**ROWS[0], "answer": "another"}])
    with raises_error("path-exists", where="f_train.csv", fix="--overwrite"):
        split_rows(DataFile("f.csv"), SPLIT)
    assert sum(split_rows(DataFile("f.csv"), SPLIT, overwrite=True).num_rows) == 41
    assert sorted(path.name for path in Path().iterdir()) == [
        "f.csv", "f_held_out.csv", "f_train.csv",
    ]  # fmt: skip


BAD_ROW = {"question": "question 0", "answer": "yes", "thumb": "perhaps"}


def test_mistakes() -> None:
    write_csv("f.csv")
    with raises_error("split-too-small", where="--share", fix="set it to"):
        split_rows(DataFile("f.csv"), PromptSplit(0.0001))
    with raises_error("output-is-input"):
        split_rows(DataFile("f.csv"), SPLIT, Path("f.csv"), overwrite=True)
    with raises_error("option-conflict"):
        split_rows(DataFile("f.csv"), SPLIT, Path("a.csv"), Path("a.csv"))
    with raises_error("split-format", where="a.jsonl", fix=".csv"):
        split_rows(DataFile("f.csv"), SPLIT, Path("a.jsonl"))
    with raises_error("split-not-rows", fix="valence import"):
        split_rows(DataFile("f.csv", format="open_webui"), SPLIT)
    with raises_error("split-not-a-file", fix="data.eval: 0.1"):
        split_rows(DataFile("owner/rows"), SPLIT)
    for name in ("rows.json", "array.jsonl"):
        Path(name).write_text("[{}]")
        with raises_error("split-format", where=name, fix="jq"):
            split_rows(DataFile(name), SPLIT)
    write_csv("f.csv", rows=[ROWS[0], BAD_ROW, BAD_ROW])
    with raises_error("row-label-invalid", where="f.csv:4"):
        split_rows(DataFile("f.csv"), SPLIT)
    assert not list(Path().glob("*_train.csv"))


@pytest.mark.parametrize("name", ["f.csv", "f.jsonl", "f.parquet"])
def test_rows_that_cannot_be_used_are_kept_and_not_held_out(name: str) -> None:
    rows = [row for good in ROWS for row in (good, BAD_ROW)]
    if name == "f.csv":
        write_csv(name, rows=rows[:-1])
    elif name == "f.jsonl":
        Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))
    else:
        pq.write_table(pa.Table.from_pylist(rows[:-1]), name)
    summary = split_rows(DataFile(name), SPLIT)
    assert [row.code for row in summary.bad] == ["row-label-invalid"] * (len(ROWS) - 1)
    assert summary.num_rows == (len(TRAIN), len(HELD_OUT))
    parts = [
        [row.value for row in read_rows(path) if not isinstance(row, BadRow)]
        for path in (summary.train, summary.held_out)
    ]
    assert parts[1] == HELD_OUT
    assert [row for row in parts[0] if row != BAD_ROW] == TRAIN
    assert parts[0].count(BAD_ROW) == len(ROWS) - 1


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    renamed = [{"x": row["question"], "y": row["answer"], "z": row["thumb"]} for row in ROWS]
    write_csv("f.csv", rows=renamed)
    section = "{path: f.csv, keys: {prompt: x, completion: y, label: z}}"
    assert command("split", section, "--share", "0.3", "--held-out", "held_out.csv") == 0
    assert f"held_out.csv: {len(HELD_OUT)} rows" in capsys.readouterr().out
    assert [row["x"] for row in read_csv(Path("held_out.csv"))] == [r["question"] for r in HELD_OUT]
    assert command("split", section, "--share", "0.3", "--seed", "1", "--overwrite") == 0
    assert read_csv(Path("f_held_out.csv")) != read_csv(Path("held_out.csv"))
    write_csv("f.csv", rows=[*renamed, {"x": "question 0", "y": "yes", "z": "perhaps"}])
    assert command("split", section, "--share", "0.3", "--overwrite") == 0
    printed = capsys.readouterr().out
    assert "1 row in f_train.csv that cannot be used:\n  f.csv:" in printed
    error = command_error("split", section, "--share", "10")
    check_error(error, "option-value", where="--share")
