"""Every kind of file gives the same rows, each with its place."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises_error
from valence.data.sources import BadRow, Row, read_rows

ROWS = [
    {"prompt": "a, b", "completion": 'say "x"\nthen y'},
    {"prompt": "ü😀", "completion": "\u2028 and \x0b"},
]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows: list[dict], delimiter: str) -> bytes:
    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    lines = [rows[0].keys(), *(map(cell, row.values()) for row in rows)]
    return "".join(delimiter.join(line) + "\n" for line in lines).encode()


def parquet(rows: list[dict]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


FILES: dict[str, tuple[Callable[[list[dict]], bytes], list[int]]] = {
    ".jsonl": (jsonl, [1, 2]),
    ".ndjson": (jsonl, [1, 2]),
    ".json": (lambda rows: json.dumps(rows, indent=1).encode(), [2, 6]),
    "-wrapped.json": (lambda rows: json.dumps({"version": 1, "data": rows}).encode(), [1, 2]),
    "-lines.json": (jsonl, [1, 2]),
    "-array.jsonl": (lambda rows: json.dumps(rows).encode(), [1, 2]),
    ".csv": (lambda rows: table(rows, ","), [2, 4]),
    ".tsv": (lambda rows: table(rows, "\t"), [2, 4]),
    ".parquet": (parquet, [1, 2]),
    "-misnamed.csv": (parquet, [1, 2]),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows_with_their_lines(
    tmp_path: Path, name: str, packed: bool
):
    write, lines = FILES[name]
    file = tmp_path / (f"rows{name}" + (".gz" if packed else ""))
    file.write_bytes(gzip.compress(write(ROWS)) if packed else write(ROWS))
    rows = list(read_rows(str(file)))
    assert [row.value for row in rows if isinstance(row, Row)] == ROWS
    assert [(row.origin.path, row.origin.line) for row in rows] == [
        (str(file), line) for line in lines
    ]


@pytest.mark.parametrize("name", [".jsonl", ".json", ".csv"])
def test_compression_is_seen_in_the_content_not_in_the_name(tmp_path: Path, name: str):
    packed, plain = tmp_path / f"packed{name}", tmp_path / f"plain{name}.gz"
    packed.write_bytes(gzip.compress(FILES[name][0](ROWS)))
    plain.write_bytes(FILES[name][0](ROWS))
    for file in (packed, plain):
        assert [row.value for row in read_rows(file) if isinstance(row, Row)] == ROWS


@pytest.mark.parametrize("name", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path, name: str):
    file = tmp_path / f"rows{name}"
    rows = [{"prompt": "a", "completion": "b"}]
    file.write_bytes(b"\xef\xbb\xbf" + FILES[name][0](rows).replace(b"\n", b"\r\n"))
    assert [row.value for row in read_rows(file) if isinstance(row, Row)] == rows


def test_blank_lines_count_as_lines_and_not_as_rows(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"a": 1}\n   \n\r\n{"a": 2}\n\n')
    assert [row.origin.line for row in read_rows(file)] == [2, 5]
    table = tmp_path / "rows.csv"
    table.write_text('a,b\n\n1,2\n"x\ny",3\n \n4,5')
    assert [row.origin.line for row in read_rows(table)] == [3, 4, 7]


def test_an_empty_cell_is_missing(tmp_path: Path):
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,\n")
    assert [row.value for row in read_rows(file) if isinstance(row, Row)] == [{"a": "1", "b": None}]


def test_limit_reads_no_further(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\nnot json\n')
    assert len(list(read_rows(file, limit=2))) == 2
    assert isinstance(list(read_rows(file, limit=3))[2], BadRow)


def test_one_chat_row_in_a_json_file_is_a_row_and_not_a_list_of_turns(tmp_path: Path):
    file = tmp_path / "row.json"
    value = {"messages": [{"role": "user", "content": "a"}], "label": True}
    file.write_text(json.dumps(value, indent=2))
    assert [row.value for row in read_rows(file) if isinstance(row, Row)] == [value]


@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.one_of(
                st.integers(),
                st.booleans(),
                st.none(),
                st.text(st.characters(exclude_categories=["Cs"])),
            ),
            min_size=1,
        ),
        min_size=1,
    )
)
def test_output_of_json_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]):
    for ascii_only in (True, False):
        lines, array = (tmp_path_factory.getbasetemp() / name for name in ("any.jsonl", "any.json"))
        lines.write_bytes(
            b"\n".join(json.dumps(row, ensure_ascii=ascii_only).encode() for row in rows)
        )
        array.write_bytes(json.dumps(rows, ensure_ascii=ascii_only).encode())
        for file in (lines, array):
            assert [row.value for row in read_rows(file) if isinstance(row, Row)] == rows


# The hub


class Splits(dict):
    """What load_dataset gives: rows by split."""


def use_hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], Splits]) -> None:
    """answer: by the name of the data set, with a slash and the subset where one is asked for."""
    import datasets

    def load(path: str, name: str | None, split: str | None) -> object:
        result = answer(f"{path}/{name}" if name else path)
        if split is not None and split not in result:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(result)}.')
        return result if split is None else result[split]

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load)


def test_a_hub_data_set_with_one_split_needs_no_name_for_it(monkeypatch: pytest.MonkeyPatch):
    use_hub(monkeypatch, lambda name: Splits(train=[{"a": 1}, {"a": 2}]))
    assert [
        (str(row.origin), row.value) for row in read_rows("owner/name") if isinstance(row, Row)
    ] == [
        ("owner/name[train]:1", {"a": 1}),
        ("owner/name[train]:2", {"a": 2}),
    ]


def test_a_hub_data_set_with_several_splits_asks_for_one(monkeypatch: pytest.MonkeyPatch):
    use_hub(monkeypatch, lambda name: Splits(train=[{"a": 1}], test=[{"a": 2}]))
    assert [str(row.origin) for row in read_rows("owner/name", split="test")] == [
        "owner/name[test]:1"
    ]
    with raises_error("hub-split-missing", where="owner/name", fix="train, test"):
        list(read_rows("owner/name"))
    with raises_error("hub-dataset", where="owner/name", fix="set `split`") as raised:
        list(read_rows("owner/name", split="dev"))
    assert "['train', 'test']" in raised.error.message  # what the hub answers


def test_a_hub_data_set_with_subsets(monkeypatch: pytest.MonkeyPatch):
    def answer(name: str) -> Splits:
        if name == "owner/name":
            raise ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['main', "
                "'socratic']\nExample: ..."
            )
        return Splits(train=[{"a": name}])

    use_hub(monkeypatch, answer)
    (row,) = read_rows("owner/name", subset="main")
    assert str(row.origin) == "owner/name/main[train]:1"
    assert isinstance(row, Row)
    assert row.value == {"a": "owner/name/main"}
    with raises_error("hub-dataset", where="owner/name", fix="set `subset`") as raised:
        list(read_rows("owner/name"))
    assert "'main', 'socratic'" in raised.error.message


def test_a_file_has_no_subsets(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}')
    with raises_error("split-not-a-hub-dataset", where="rows.jsonl", fix="subset"):
        list(read_rows(tmp_path / "rows.jsonl", subset="main"))


def test_messages_of_the_hub_are_passed_on(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> Splits:
        raise ValueError("Access denied.")

    use_hub(monkeypatch, refuse)
    with raises_error("hub-dataset", where="owner/name", fix="access") as raised:
        list(read_rows("owner/name"))
    assert "Access denied." in raised.error.message


def test_a_refused_connection_to_the_hub_is_reported_immediately(monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    with raises_error("hub-unreachable", where="owner/name", fix="HF_HUB_OFFLINE=1"):
        list(read_rows("owner/name"))
