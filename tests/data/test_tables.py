"""Tables: delimiters, empty rows and wide headers of csv; dates and checksums of parquet."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.rows import Source
from tests.errors import raises_error
from valence.data.load import load
from valence.data.sources import DELIMITERS, BadRow, Row, read_rows

COLUMNS = ["prompt", "completion", "label"]


def read(file: Path) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """Values of good rows, lines of bad ones, and the delimiter that each note names."""
    notes: list[str] = []
    rows = list(read_rows(file, notes=notes))
    return (
        [row.value for row in rows if isinstance(row, Row)],
        [row.origin.line for row in rows if isinstance(row, BadRow)],
        [next(name for name in DELIMITERS.values() if name in note) for note in notes],
    )


def table(rows: list[list[str]], delimiter: str, quoting: Any = csv.QUOTE_MINIMAL) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerows(rows)
    return out.getvalue()


cells = st.text(st.sampled_from("ab,;\t|\"\n '1"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(cells, cells, cells).map(list), min_size=1, max_size=30),
    st.sampled_from(",;\t|"),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["csv", "tsv"]),
)
def test_the_delimiter_is_found_whatever_is_in_the_texts(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[str]],
    delimiter: str,
    quoting: Any,
    suffix: str,
) -> None:
    file = tmp_path_factory.getbasetemp() / f"delimiter.{suffix}"
    file.write_text(table([COLUMNS, *rows], delimiter, quoting))
    values, bad, notes = read(file)
    assert [list(value.values()) for value in values] == rows
    assert bad == []
    assert all(list(value) == COLUMNS for value in values)
    is_usual = delimiter == {"csv": ",", "tsv": "\t"}[suffix]
    assert notes == ([] if is_usual else [DELIMITERS[delimiter]])


def test_the_rows_decide_the_delimiter_of_an_ambiguous_header(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt;completion;label,score\nHello, you, there;Hi;1\nBye;Bye;0\n")
    assert read(file) == (
        [
            {"prompt": "Hello, you, there", "completion": "Hi", "label,score": "1"},
            {"prompt": "Bye", "completion": "Bye", "label,score": "0"},
        ],
        [],
        ["semicolons"],
    )


def test_ragged_rows_do_not_change_the_delimiter(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt;completion\na;b;c\nd;e\nf\n")
    assert read(file) == ([{"prompt": "d", "completion": "e"}], [2, 4], ["semicolons"])


def test_one_long_cell_hides_no_delimiter(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"prompt;label\n{'x, ' * 100_000};1\n")
    values, bad, notes = read(file)
    assert (len(values), bad, notes) == (1, [], ["semicolons"])


@pytest.mark.parametrize(("text", "good", "bad"), [
    ("text\na\n\nb\n", 2, [3]),
    ("text\n\na\n  \n\nb", 2, [2, 4, 5]),
    ('text\na\n""\n', 1, [3]),
    ('text\na\n""\n\n\n', 1, [3]),
    ("text\na\n\n\n", 1, []),
    ("\n\ntext\na\n", 1, []),
    ('text\n"a\n\nb"\n\nc\n', 2, [5]),
    ("a,b\n\n1,2\n\n", 1, []),
])  # fmt: skip
def test_empty_rows_of_one_column_are_counted(
    text: str, good: int, bad: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "a.csv"
    file.write_text(text)
    values, lines, _ = read(file)
    assert (len(values), lines) == (good, bad)


def test_a_hundred_thousand_columns_are_read_and_messages_stay_short(tmp_path: Path) -> None:
    """Takes minutes where the time grows with the square of the columns."""
    file = tmp_path / "a.csv"
    wide = [f"column {n}" for n in range(100_000)]
    file.write_text(table([[*COLUMNS, *wide], ["a", "b", "true", *["x"] * len(wide)]], ","))
    loaded = load([Source(str(file))], "judgement")
    assert len(loaded.ignored_columns) == 100_000
    with raises_error("format-unknown-columns") as raised:
        load([Source(write_wide(tmp_path, wide))], "judgement")
    assert len(str(raised.error)) < 2000
    with raises_error("column-duplicate") as raised:
        load([Source(write_wide(tmp_path, [*wide, wide[-1]]))], "judgement")
    assert "column 99999" in raised.error.message


def write_wide(folder: Path, header: list[str]) -> str:
    file = folder / "wide.csv"
    file.write_text(table([header, ["x"] * len(header)], ","))
    return str(file)


# Parquet


def write_parquet(file: Path, columns: dict[str, Any], **options: Any) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), file, **options)
    return str(file)


def odd_columns() -> dict[str, Any]:
    """Columns of two values that Arrow holds, of which the second is none of Python's."""
    import pyarrow as pa

    huge = 2**62
    return {
        "microseconds": pa.array([0, huge], pa.timestamp("us")),
        "zone": pa.array([0, 1], pa.timestamp("us", tz="No/Where")),
        "seconds": pa.array([0, 2**50], pa.timestamp("s")),
        "duration": pa.array([0, 2**50], pa.duration("s")),
        "day": pa.array([0, 2**31 - 1], pa.date32()),
        "inside": pa.array([{"at": 0}, {"at": huge}], pa.struct([("at", pa.timestamp("us"))])),
    }


def test_dates_out_of_range_are_errors_only_where_they_are_used(tmp_path: Path) -> None:
    good = {"prompt": ["p", "q"], "completion": ["a", "b"], "label": [True, False]}
    for name, column in odd_columns().items():
        path = write_parquet(tmp_path / "a.parquet", {**good, name: column})
        loaded = load([Source(path)], "judgement")
        assert [e.prompt for e in loaded.examples] == ["p", "q"]
        assert loaded.ignored_columns == {name: 2}
        code = "row-role-invalid" if name == "inside" else "row-value-type"
        with raises_error(code, where="a.parquet:") as raised:
            load([Source(path, keys={"prompt": name})], "judgement")
        assert str(raised.error.where).rpartition(":")[2] in ("1", "2")
        assert name in raised.error.message
        rows = {"prompt": ["p", "q"], name: column}
        assert (
            len(load([Source(write_parquet(tmp_path / "b.parquet", rows))], "prompt").examples) == 2
        )


def test_a_good_row_next_to_an_unreadable_one(tmp_path: Path) -> None:
    import pyarrow as pa

    text = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    path = write_parquet(tmp_path / "a.parquet", {"prompt": text, "completion": ["a", "b"]})
    loaded = load([Source(path)], "demonstration", on_bad_row="skip")
    assert [e.prompt for e in loaded.examples] == ["fine"]
    assert [str(row.origin) for row in loaded.bad] == [f"{path}:2"]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_flipped_bit_of_a_page_fails_its_checksum(compression: str, tmp_path: Path) -> None:
    columns = {
        "prompt": [f"question {n}" for n in range(50)],
        "completion": ["x"] * 50,
        "label": [True] * 50,
    }
    file = tmp_path / "a.parquet"
    write_parquet(
        file, columns, write_page_checksum=True, compression=compression, use_dictionary=False
    )
    assert len(load([Source(str(file))], "judgement").examples) == 50
    content = bytearray(file.read_bytes())
    place = content.index(b"question 1") + 9 if compression == "none" else 60
    content[place] ^= 1
    file.write_bytes(content)
    with raises_error("file-damaged", where="a.parquet") as raised:
        load([Source(str(file))], "judgement")
    assert re.search(r"\brow \d+", raised.error.message)
    assert raised.error.fix
