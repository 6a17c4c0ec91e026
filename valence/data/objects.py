"""Rows that a program holds: lists of dictionaries or Examples, DataFrames, data sets, and paths of
files.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from valence.errors import UserError
from valence.types import Example

Rows = Iterable[Mapping[str, Any] | Example]
"""Dictionaries in any format that a file may have, or Examples."""

PathOrPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file of rows, or several."""

ROWS_FIX = "pass a list of dictionaries, a DataFrame, a datasets.Dataset, or the path of a file"


def paths_from(value: object) -> list[str] | None:
    """The paths, where ``value`` is a path or a list of paths; None for rows."""
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]  # pyright: ignore[reportUnknownArgumentType]
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(item, str | os.PathLike) for item in value)
    ):
        return [os.fspath(item) for item in value]
    return None


def as_overrides(
    data: Mapping[str, Rows | PathOrPaths | float | None], overrides: Sequence[str]
) -> tuple[dict[str, Rows | None], list[str]]:
    """Separate rows in memory from paths and shares, which become overrides such as
    ``data.train=...``, so that the run folder names them. data: by list, such as ``train``.
    """
    rows: dict[str, Rows | None] = {}
    words = list(overrides)
    for name, value in data.items():
        paths = paths_from(value)
        if paths is not None or isinstance(value, int | float):
            words.append(f"data.{name}={json.dumps(value if paths is None else paths)}")
        else:
            rows[name] = None if value is None else rows_from(value)
    return rows, words


def rows_from(value: Any) -> Rows:
    """The rows of a DataFrame, a ``datasets.Dataset``, or any iterable of dictionaries or Examples.

    Missing values of a DataFrame become None. Raises UserError for anything else.
    """
    pandas, datasets = (sys.modules.get(name) for name in ("pandas", "datasets"))
    if pandas and isinstance(value, pandas.DataFrame):
        return _FrameRows(value)
    if datasets and isinstance(value, datasets.Dataset):
        return value.with_format(None)
    if datasets and isinstance(value, datasets.DatasetDict):
        raise UserError(
            f"the data set has several splits: {', '.join(value)}",
            code="split-missing",
            where="rows",
            fix=f'pass one of them, such as dataset["{next(iter(value))}"]',
        )
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise UserError(
            f"the value has type {type(value).__name__}, which is not a list of rows",
            code="rows-type",
            where="rows",
            fix=ROWS_FIX,
        )
    return value


class _FrameRows:
    """Rows of a DataFrame as dictionaries of plain Python values, converted when they are read."""

    def __init__(self, frame: Any) -> None:
        names = [str(name) for name in frame.columns]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise UserError(
                f"the DataFrame has two columns {twice[0]!r}",
                code="column-duplicate",
                where="rows",
                fix="give every column a unique name",
            )
        self._frame, self._names = frame, names

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for cells in self._frame.itertuples(index=False, name=None):
            yield {name: _plain(cell) for name, cell in zip(self._names, cells, strict=True)}

    def __len__(self) -> int:
        return len(self._frame)


def _plain(value: Any) -> Any:
    """A cell without NumPy's types; NaN, NaT and NA are None."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    if hasattr(value, "tolist"):  # an array or a scalar of NumPy
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else value
    return None if type(value).__name__ in ("NAType", "NaTType") else value
