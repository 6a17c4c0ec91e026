"""Realistic malformed files.

Each file either works, or ends in one UserError with the place and the fix. None ends in another
exception, and no row is dropped without a message.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.malformed import CASES, CSV, GOOD, Case
from tests.data.rows import Source
from tests.errors import check_error
from valence.data.detect import detect
from valence.data.format_table import FORMATS
from valence.data.formats import read_example
from valence.data.load import load
from valence.errors import UserError
from valence.types import Origin

T = TypeVar("T")


def read(case: Case, folder: Path, **more: Any):
    return load([Source(case.write(folder), **case.source)], case.kind, **more)


def check_row_error(error: UserError, place: str, code: str, *names: str) -> None:
    """names: columns, values and settings that the error mentions."""
    check_error(error, code)
    assert error.where == place
    assert error.fix
    for name in names:
        assert name in f"{error.message}\n{error.fix}", error
    assert len(str(error)) < 1500


@pytest.mark.parametrize("case", [c for c in CASES if c.works], ids=lambda c: c.name)
def test_unusual_valid_files_are_read(case: Case, tmp_path: Path):
    loaded = read(case, tmp_path)
    assert (len(loaded.examples), loaded.files[0].rows, loaded.bad) == (case.works, case.works, ())


@pytest.mark.parametrize("case", [c for c in CASES if c.error], ids=lambda c: c.name)
def test_a_mistake_is_reported_once_with_its_place_and_fix(case: Case, tmp_path: Path):
    assert case.error is not None
    with pytest.raises(UserError) as caught:
        read(case, tmp_path)
    path = str(tmp_path / case.file)
    where = f"{path}:{case.line}" if case.line else path
    check_row_error(caught.value, where, case.error.code, *case.error.names)
    can_be_skipped = case.row or is_line_fault(case)
    assert ("data.on_bad_row: skip" in str(caught.value.fix)) == can_be_skipped


def is_line_fault(case: Case) -> bool:
    """Faults of a row in a file that has no usable one."""
    return case.name in ("rows over several lines in jsonl", "a number for a file", "latin-1")


@pytest.mark.parametrize("case", [c for c in CASES if c.row], ids=lambda c: c.name)
def test_a_bad_row_can_be_skipped_and_is_listed(case: Case, tmp_path: Path):
    assert case.error is not None
    loaded = read(case, tmp_path, on_bad_row="skip")
    [bad] = loaded.bad
    assert (str(bad.origin), bad.code) == (f"{tmp_path / case.file}:{case.line}", case.error.code)
    assert all(name in f"{bad.reason}\n{bad.fix}" for name in case.error.names)
    assert bad.fix
    assert loaded.files[0].rows == len(loaded.examples) + 1
    assert loaded.examples


@pytest.mark.parametrize("case", [c for c in CASES if c.error and not c.row], ids=lambda c: c.name)
def test_errors_of_a_file_cannot_be_skipped(case: Case, tmp_path: Path):
    if case.name == "latin-1":  # its first line can be used
        assert len(read(case, tmp_path, on_bad_row="skip").bad) == 1
        return
    with pytest.raises(UserError) as caught:
        read(case, tmp_path, on_bad_row="skip")
    assert str(tmp_path / case.file) in (caught.value.where or "")
    assert case.error is not None
    assert caught.value.code == ("no-usable-rows" if is_line_fault(case) else case.error.code)


# Places


def test_a_missing_file_names_the_nearest(tmp_path: Path):
    (tmp_path / "feedback.jsonl").write_text(GOOD)
    (tmp_path / "fedback.jsonl.d").mkdir()  # a folder has no rows
    path = str(tmp_path / "fedback.jsonl")
    with pytest.raises(UserError) as caught:
        load([Source(path)], "judgement")
    check_row_error(caught.value, path, "file-not-found", "did you mean", "feedback.jsonl?")
    assert "fedback.jsonl.d" not in str(caught.value.fix)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nothing/like/this.jsonl", "file-not-found"),
        ("x" * 300 + ".jsonl", "file-not-readable"),
        ("a\0b.jsonl", "file-not-found"),
    ],
)
def test_paths_that_cannot_be(tmp_path: Path, name: str, code: str):
    path = str(tmp_path / name)
    with pytest.raises(UserError) as caught:
        load([Source(path)], "judgement")
    check_row_error(caught.value, path, code)


def test_the_error_of_a_folder_lists_its_files(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(UserError) as caught:
        load([Source(str(tmp_path))], "judgement")
    check_row_error(caught.value, str(tmp_path), "path-is-folder", "a.jsonl")


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD)

    def refuse(*args: object, **more: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError) as caught:
        load([Source(str(path))], "judgement")
    check_row_error(caught.value, str(path), "file-not-readable", "chmod")


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    path = str(tmp_path / "a.jsonl")
    os.mkfifo(path)
    with pytest.raises(UserError) as caught:
        load([Source(path)], "judgement")
    check_row_error(caught.value, path, "file-not-regular")


def test_a_file_with_only_bad_rows_is_an_error(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("x\ny\n")
    with pytest.raises(UserError) as caught:
        load([Source(str(path))], "judgement", on_bad_row="skip")
    check_row_error(caught.value, f"{path}:1", "no-usable-rows", "of 2 rows", "2 x")


def outcome(call: Callable[[], T]) -> tuple[T, None] | tuple[None, UserError]:
    try:
        return call(), None
    except UserError as error:
        return None, error


SEEDS = {
    "a.jsonl": f"{GOOD}\n{GOOD}\n".encode(),
    "a.json": f"[{GOOD},\n{GOOD}]".encode(),
    "a.csv": CSV.encode(),
    "a.jsonl.gz": gzip.compress(GOOD.encode()),
}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(SEEDS)),
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=4),
)
def test_any_damage_ends_in_rows_or_in_one_message(
    tmp_path_factory: pytest.TempPathFactory, file: str, damage: list[tuple[int, bytes]]
):
    content = SEEDS[file]
    for place, new in damage:
        place %= len(content) + 1
        content = content[:place] + new + content[place + 1 :]
    path = tmp_path_factory.getbasetemp() / file
    path.write_bytes(content)
    loaded, error = outcome(lambda: load([Source(str(path))], "judgement", on_bad_row="skip"))
    if loaded is None:
        assert error is not None
        assert error.fix
        assert (error.where or "").startswith(str(path))
    else:
        assert sum(f.rows for f in loaded.files) == len(loaded.examples) + len(loaded.bad)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls"]), inner
        )
    ),
    max_leaves=6,
)
columns = st.sampled_from(sorted({column for f in FORMATS.values() for column in f.columns}))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(columns, values, max_size=6))
def test_any_values_in_any_columns_end_in_an_example_or_in_one_message(
    name: str, row: dict[str, Any]
):
    for chosen in (name, None):
        example, error = outcome(
            lambda: read_example(chosen or detect([row]), row, Origin("rows.jsonl", 1))  # noqa: B023
        )
        assert example is not None or (error is not None and error.fix)


def test_no_files_at_all():
    with pytest.raises(UserError) as caught:
        load([], "judgement")
    check_row_error(caught.value, "data", "no-usable-rows", "0 rows")
