"""Divide a file of rows by their prompts into rows to train on and rows to hold out."""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from valence.data.importers.sources import is_source
from valence.data.load import DataFile, recognize, stream
from valence.data.sources import BOM, BadRow, is_hub_dataset
from valence.data.split import PromptSplit
from valence.errors import UserError
from valence.files import check_path, expand_path
from valence.jobs.row_job import refuse_inputs
from valence.storage import part_path, publish, writing

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
PARQUET = ".parquet"
GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """The files that were written, and their numbers of rows and of different prompts.

    bad: rows that cannot be used. They are in ``train`` and not counted in its numbers.
    """

    train: Path
    held_out: Path
    num_rows: tuple[int, int]
    num_prompts: tuple[int, int]
    bad: tuple[BadRow, ...]


def split_rows(
    file: DataFile,
    split: PromptSplit,
    train: Path | None = None,
    held_out: Path | None = None,
    *,
    overwrite: bool = False,
) -> SplitSummary:
    """Write the rows of a file to two files of the same format, by the rule of ``data.eval``.

    Lines of text files are copied byte by byte; a header is written to both. train, held_out: the
    files to write; by default next to the file, with the same name and ``_train`` or ``_held_out``.

    Rows that cannot be used go to the first file: ``data.on_bad_row`` decides about them.

    Raises UserError if they are more than the others, if one side would have too few prompts, and
    for files that exist, unless overwrite is set.
    """
    path = Path(expand_path(file.path))
    suffix = _check_input(file)
    outputs = (
        train or _output_path(path, suffix, "train"),
        held_out or _output_path(path, suffix, "held_out"),
    )
    for output in outputs:
        _check_output(output, path, overwrite=overwrite)
    if outputs[0].resolve() == outputs[1].resolve():
        raise UserError(
            "both parts would be written to the same file",
            code="option-conflict",
            where="--held-out",
            fix="choose different files with --train and --held-out",
        )
    refuse_inputs(outputs, [file.path])
    positions: dict[int, float] = {}  # by line, or by number of the row
    bad: list[BadRow] = []
    for row, example in stream(recognize(file)):
        if isinstance(example, BadRow):
            bad.append(example)
        else:
            positions[row.origin.line] = split.position(example.prompt)
    if len(bad) > len(positions):  # the columns were probably not understood
        first = bad[0]
        raise UserError(first.reason, code=first.code, where=str(first.origin), fix=first.fix)
    split.check(list(positions.values()), "--share")
    sides = {place: position < split.share for place, position in positions.items()}
    _write(outputs, path, {row.origin.line: False for row in bad} | sides)
    parts = [
        [position for place, position in positions.items() if sides[place] is side]
        for side in (False, True)
    ]
    return SplitSummary(
        *outputs,
        num_rows=(len(parts[0]), len(parts[1])),
        num_prompts=(len(set(parts[0])), len(set(parts[1]))),
        bad=tuple(bad),
    )


def _check_input(file: DataFile) -> str:
    """The suffix of a file that can be divided, with ``.gz``. Raises UserError for others."""
    in_recipe = "set data.eval: 0.1 in the recipe, which needs no files"
    if is_hub_dataset(file.path):
        raise UserError(
            "a data set of the hub is not a file",
            code="split-not-a-file",
            where=file.path,
            fix=in_recipe,
        )
    if is_source(file.format):
        raise UserError(
            "the votes in the export of a feedback tool are no rows yet",
            code="split-not-rows",
            where=file.path,
            fix=f"convert it first, with `valence import`; or {in_recipe}",
        )
    name = file.path.lower()
    packed = ".gz" if name.endswith(".gz") else ""
    suffix = Path(name.removesuffix(".gz")).suffix
    path = Path(expand_path(file.path))
    is_array = path.is_file() and suffix in (".jsonl", ".ndjson") and _head(path).startswith(b"[")
    if path.is_file() and (suffix not in (*TEXT_SUFFIXES, PARQUET) or is_array):
        quoted = shlex.quote(file.path)
        raise UserError(
            "only files with one row per record can be divided: "
            + ", ".join((*TEXT_SUFFIXES, PARQUET)),
            code="split-format",
            where=file.path,
            fix=f"write one row per line (jq -c '.[]' {quoted} > rows.jsonl); or {in_recipe}",
        )
    return file.path[len(file.path) - len(suffix) - len(packed) :]


def _open(path: Path) -> IO[bytes]:
    """The content of a file, unpacked if it is compressed."""
    with path.open("rb") as file:
        is_packed = file.read(2) == GZIP
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def _head(path: Path) -> bytes:
    with _open(path) as file:
        return file.read(4096).removeprefix(BOM).lstrip()


def _output_path(path: Path, suffix: str, part: str) -> Path:
    return path.parent / f"{path.name.removesuffix(suffix)}_{part}{suffix}"


def _check_output(output: Path, path: Path, *, overwrite: bool) -> None:
    check_path(output)
    if output.is_dir() or not output.parent.is_dir():
        raise UserError(
            "the path is a folder" if output.is_dir() else "the folder does not exist",
            code="path-invalid-output",
            where=str(output),
            fix="choose a file in an existing folder",
        )
    if _kind(output) != _kind(path):
        raise UserError(
            f"the parts of a {path.suffix} file have the same format",
            code="split-format",
            where=str(output),
            fix=f"use a file name that ends in {path.suffix}",
        )
    if output.exists() and not overwrite:
        raise UserError(
            "the file already exists",
            code="path-exists",
            where=str(output),
            fix="add --overwrite to replace it, or choose another file",
        )


def _kind(path: Path) -> list[str]:
    return [suffix.lower() for suffix in path.suffixes if suffix.lower() == ".gz"] + [
        Path(path.name.lower().removesuffix(".gz")).suffix
    ]


def _write(outputs: tuple[Path, Path], path: Path, sides: Mapping[int, bool]) -> None:
    """Write both files in one step each, after both are complete."""
    partials = [part_path(output) for output in outputs]
    fix = "free disk space or make the folder writable"
    with ExitStack() as stack, writing(outputs[0], fix):
        for partial in partials:
            stack.callback(partial.unlink, missing_ok=True)
        if _head(path).startswith(b"PAR1"):
            _write_parquet(partials, path, sides)
        else:
            _write_lines(partials, path, sides)
        for output in outputs:
            publish(output)


def _write_lines(outputs: list[Path], path: Path, sides: Mapping[int, bool]) -> None:
    """Copy each line to the side of the last row that started at or before it.

    Lines before the first row are a header, which both files get.
    """
    with ExitStack() as files:
        source = files.enter_context(_open(path))
        open_new = gzip.open if isinstance(source, gzip.GzipFile) else open
        train, held_out = (files.enter_context(open_new(output, "wb")) for output in outputs)
        targets = [train, held_out]
        for number, line in enumerate(_complete(source), 1):
            if number in sides:
                targets = [held_out if sides[number] else train]
            for target in targets:
                target.write(line)


def _complete(source: IO[bytes]) -> Iterator[bytes]:
    """The lines, the last one with the line end that the file lacks."""
    for line in source:
        yield line if line.endswith(b"\n") else line + b"\n"


def _write_parquet(outputs: list[Path], path: Path, sides: Mapping[int, bool]) -> None:
    import pyarrow.parquet as pq

    with _open(path) as source:
        table = pq.read_table(source)
    for output, side in zip(outputs, (False, True), strict=True):
        rows = [number - 1 for number, is_held_out in sides.items() if is_held_out is side]
        pq.write_table(table.take(rows), output)


__all__ = ["SplitSummary", "split_rows"]
