"""A resumable job that writes JSON Lines: read items, skip those already in the output, compute the
rest in batches, append complete lines.

`score`, `sample` and `score --reward` are three uses of it. Each states what an item becomes
(``RowTransform``). Everything else is here, in the order in which it happens:

1. ``RowJob``: refuse outputs that cannot be written, that are inputs, or that contain other lines.
2. ``RowJob.check_facts``: refuse to resume with other settings, data or models.
3. ``RowJob.run``: lock the file, verify its lines against their items, remove an incomplete batch,
   compute and append the other batches, and count the outcomes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar
from zlib import crc32

from rich.console import Console

from valence.distributed.process_group import Group, SingleProcess
from valence.errors import UserError
from valence.files import check_path
from valence.reports.console import Progress
from valence.storage import (
    InUseError,
    LineFile,
    add_checksum,
    atomic_write,
    read_json,
    rename,
    verify,
    writing,
)
from valence.terminal import Terminal, print_message, print_warning, prints_only_warnings
from valence.training.signals import Stop
from valence.version import __version__

START_OVER = "choose another --out file, or start over with --fresh, which renames the old file"
ABOUT = "about"
"""Key of the facts file: information for readers, which may differ between calls."""
DIGESTS = {
    "model": "model, or with another data type of the model",
    "reference": "reference model",
    "vocabulary": "vocabulary of the tokenizer",
    "tokenizer": "tokenizer or chat template",
    "template": "chat template, or with another data.as_chat",
}
"""Facts that are checksums, and what they identify."""
EARLIER = "earlier"
"""Key of the facts file: the facts and the number of earlier lines, before an append."""
MAX_LISTED = 3
"""Maximum number of failed rows to list."""

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)
Line = Mapping[str, Any]


class RowTransform(Protocol[Item_contra]):
    """Converts the items of a job (rows or prompts) into lines."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens processed so far, for the display of progress. None: not counted."""
        ...

    def compute(
        self, batch: Sequence[Item_contra], advance: Callable[[int], None]
    ) -> Sequence[Line]:
        """The lines of a batch, in order, the same on all processes.

        All processes call it. ``advance`` takes the number of lines computed since its last call.
        """
        ...

    def origin(self, item: Item_contra) -> str:
        """The place of an item, for messages."""
        ...

    def is_valid(self, line: Line, index: int) -> bool:
        """Whether this transform wrote a line as the line ``index`` of its item."""
        ...

    def is_line_of(self, line: Line, item: Item_contra) -> bool:
        """Whether a valid line belongs to the current content of this item."""
        ...

    def error_in(self, line: Line) -> str | None:
        """The error in a line without a result."""
        ...


@dataclass
class Tally:
    """Outcomes. ``rows``: lines in the file; ``earlier``: those of earlier calls; ``failed``: those
    with an error; ``first``: the first errors, with their origins.
    """

    rows: int = 0
    earlier: int = 0
    failed: int = 0
    first: list[str] = field(default_factory=list[str])

    def add(self, origin: str, error: str | None) -> None:
        self.rows += 1
        if error is not None:
            self.failed += 1
            self.first += [f"{origin}: {error}"] if len(self.first) < MAX_LISTED else []


class RowJob:
    """One call of the job, as a context manager that listens for signals.

    inputs: paths that are read, which the output must not be. window: items that are written
    together; at most their lines are lost when the program is killed. lines_per_item: of the
    output. fresh: rename an existing output. append: names of facts that must agree; if only other
    facts differ and the output is complete, lines are appended to it. fix: for facts that differ.
    group: processes that share the work; rank 0 writes.

    Raises UserError for an output that cannot be written or resumed, which is then unchanged.
    """

    def __init__(
        self,
        out: Path,
        inputs: Iterable[str],
        *,
        window: int,
        lines_per_item: int = 1,
        fresh: bool = False,
        append: Collection[str] | None = None,
        fix: str = START_OVER,
        console: Console | None = None,
        group: Group | None = None,
    ) -> None:
        self.out, self.window, self.lines_per_item = out, window, lines_per_item
        self.console, self.group = console or Terminal(), group or SingleProcess()
        refuse_inputs([out], inputs)
        self.output: OutputFile | None = None
        if self.group.rank == 0:
            lines = window * lines_per_item
            self.output = OutputFile(out, lines, fresh=fresh, append=append, fix=fix)
        self._signals = Stop(self.console).listening()

    def __enter__(self) -> RowJob:
        self._signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._signals.__exit__(kind, error, trace)

    def print_status(self, message: str) -> None:
        print_message(self.console, message)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts that all lines depend on. Raises UserError if existing lines were written with
        different facts.
        """
        if self.output is not None:
            self.output.check_facts(facts)

    def finished_lines(
        self, num_items: int, about: Mapping[str, Any], later_facts: Collection[str]
    ) -> list[Line] | None:
        """All lines, if an earlier call wrote them with the same facts and this information.

        later_facts: names of facts that the caller does not know yet. None: lines are missing, or
        could have been written by another model.
        """
        num_lines = num_items * self.lines_per_item
        if self.output is None or not self.output.is_finished(num_lines, about, later_facts):
            return None
        return list(self.output.read())

    def run(
        self,
        transform: RowTransform[Item],
        items: Iterable[Item],
        num_items: int,
        phase: str,
        about: Mapping[str, Any],
        *,
        batch_size: int | None = None,
    ) -> Tally:
        """Write the lines of all items. Items are read one batch at a time.

        phase: name of the progress display. about: facts for readers of the facts file.
        batch_size: items computed together, a multiple of the window; default: the window.
        """
        items, num_lines = iter(items), num_items * self.lines_per_item
        with self.output.open(num_lines) if self.output else nullcontext():
            tally = self._skip_written(transform, items)
            if self.output:
                self.output.truncate({**about, "valence": __version__})
            with Progress(self.console, phase, num_lines, start=tally.rows) as bar:
                while batch := list(islice(items, batch_size or self.window)):
                    self._write_batch(transform, batch, tally, bar)
        return tally

    def _skip_written(self, transform: RowTransform[Item], items: Iterator[Item]) -> Tally:
        """Skip the items whose lines are complete. Raises UserError for a line of another item."""
        if self.output is None:
            num_lines = int(self.group.broadcast(None))
            for _ in islice(items, num_lines // self.lines_per_item):
                pass
            return Tally(rows=num_lines, earlier=num_lines)
        tally = Tally(earlier=self.output.num_existing)
        lines = zip(count(1 + self.output.num_appended_to), self.output.read(), strict=False)
        for item in islice(items, self.output.num_existing // self.lines_per_item):
            for index, (number, line) in enumerate(islice(lines, self.lines_per_item)):
                if not transform.is_valid(line, index):
                    raise self.output.foreign_line(number)
                if not transform.is_line_of(line, item):
                    raise UserError(
                        f"the rows have changed: {self.out}:{number} was written for another row",
                        code="output-rows-changed",
                        where=transform.origin(item),
                        fix=f"undo the change of the rows; or {START_OVER}",
                    )
                tally.add(transform.origin(item), transform.error_in(line))
        self.group.broadcast(tally.rows)
        return tally

    def _write_batch(
        self, transform: RowTransform[Item], batch: Sequence[Item], tally: Tally, bar: Progress
    ) -> None:
        position, end = tally.rows, tally.rows + len(batch) * self.lines_per_item

        def advance(num_lines: int) -> None:
            nonlocal position
            position = min(position + num_lines, end)  # an estimate if several processes compute
            bar.update(position, tokens=transform.num_tokens)

        lines = transform.compute(batch, advance)
        if self.output:
            self.output.write([as_line(line) for line in lines])
        for i, line in enumerate(lines):
            origin = transform.origin(batch[i // self.lines_per_item])
            tally.add(origin, transform.error_in(line))
        bar.update(tally.rows, tokens=transform.num_tokens)

    def report_scores(self, tally: Tally) -> None:
        """Print how many rows were scored, and which failed.

        Raises UserError when no row was scored.
        """
        if tally.failed == tally.rows:
            raise UserError(
                f"none of the {tally.rows:,} rows could be scored; the first error: "
                f"{tally.first[0]}",
                code="no-usable-rows",
                where=str(self.out),
                fix="fix the cause of the errors, which are in this file, then start over with "
                "--fresh",
            )
        num_scored = tally.rows - tally.failed
        earlier = f" ({tally.earlier:,} of them were already there)" if tally.earlier else ""
        self.print_status(
            f"{num_scored:,} of {tally.rows:,} rows have scores in {self.out}{earlier}"
        )
        if tally.failed:
            ellipsis = ["  ..."] if tally.failed > len(tally.first) else []
            errors = [*(f"  {error}" for error in tally.first), *ellipsis]
            verb = "has" if tally.failed == 1 else "have"
            failures = "\n".join([f"{tally.failed:,} {verb} an error instead:", *errors])
            if prints_only_warnings(self.console):
                print_warning(self.console, f"{self.out}: of {tally.rows:,} rows {failures}")
            else:
                print_message(self.console, failures)


# The output


class OutputFile:
    """Lines that are appended one window at a time by one program at a time.

    ``FILE.about.json`` contains the facts that all lines depend on, and ``FILE.crc`` a checksum of
    each line, written before the line. To resume, only complete windows are kept, so that the other
    lines are the same as without an interruption. Call ``open``, then ``read``, then ``truncate``,
    then ``write`` for each window.
    """

    def __init__(
        self,
        path: Path,
        window: int,
        *,
        fresh: bool = False,
        append: Collection[str] | None = None,
        fix: str = START_OVER,
    ) -> None:
        check_output(path)
        self.path, self.window, self.fresh, self.append, self.fix = path, window, fresh, append, fix
        self.facts_path, self.checksum_path = _facts_path(path), _checksum_path(path)
        self.facts: dict[str, Any] = {}
        self.about: Mapping[str, Any] = {}
        self.num_appended_to = self.num_existing = self.num_expected = 0
        self.earlier: list[dict[str, Any]] = []
        self.stored_facts = None if fresh else self._read_facts()

    def _read_facts(self) -> dict[str, Any] | None:
        """The facts of the existing lines; None if there are no lines."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return None
        try:
            facts = read_json(self.facts_path)
            if isinstance(facts, dict):
                facts = verify(facts)
            self.checksum_path.stat()
        except FileNotFoundError as error:
            raise self._error(
                f"the file was not written by this command ({Path(error.filename).name} is "
                f"missing)",
                "output-foreign",
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"the file with the settings of {self.path} cannot be read ({error})",
                code="file-not-readable",
                where=str(self.facts_path),
                fix=START_OVER,
            ) from error
        about = facts.pop(ABOUT, None) if isinstance(facts, dict) else None
        if not isinstance(about, dict):
            raise self._damaged_facts()
        self.about = about
        earlier = facts.pop(EARLIER, [])
        if not isinstance(earlier, list) or not all(
            isinstance(part, dict) and isinstance(part.get("lines"), int) for part in earlier
        ):
            raise self._damaged_facts()
        self.earlier, self.num_expected = earlier, about.get("lines", 0)
        return facts

    def _damaged_facts(self) -> UserError:
        return UserError(
            f"the file does not contain the settings that {self.path} was written with",
            code="output-state-damaged",
            where=str(self.facts_path),
            fix=START_OVER,
        )

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts. Raises UserError if existing lines were written with different ones."""
        self.facts |= json.loads(json.dumps(facts))
        self._compare_facts()

    def _compare_facts(self) -> None:
        if self.stored_facts is None:
            return
        for name, value in self.facts.items():
            stored = self.stored_facts.get(name)
            if stored != value and (self.append is None or name in self.append):
                raise UserError(
                    _difference(name, stored, value),
                    code="output-settings-differ",
                    where=f"{self.path} ({name})",
                    fix=self.fix,
                )

    def is_finished(
        self, num_lines: int, about: Mapping[str, Any], later_facts: Collection[str]
    ) -> bool:
        """Whether the file has these lines and no others; ``read`` then returns them."""
        if self.stored_facts is None or self.earlier or self.num_expected != num_lines:
            return False
        facts = {name: v for name, v in self.stored_facts.items() if name not in later_facts}
        is_same = all(self.about.get(name) == value for name, value in about.items())
        if facts != self.facts or not is_same:
            return False
        self.num_existing = sum(1 for _ in self._lines())
        return self.num_existing == num_lines

    def open(self, num_lines: int) -> OutputFile:
        """Lock the file to write all lines up to ``num_lines``; ``num_existing`` of them exist."""
        with self._writing(), ExitStack() as on_failure:
            self._file = on_failure.enter_context(self._open_locked())
            self._checksums = on_failure.enter_context(LineFile(self.checksum_path, sync=False))
            self.stored_facts = self._read_facts()  # another program may have written since
            self._compare_facts()
            if self.stored_facts is not None and self.stored_facts.keys() != self.facts.keys():
                raise self._damaged_facts()
            if self.stored_facts is not None and self.stored_facts != self.facts:
                self._append_to(self.stored_facts)
            self.num_appended_to = sum(part["lines"] for part in self.earlier)
            self.num_existing = self._count_finished(num_lines)
            self.num_expected = num_lines
            on_failure.pop_all()
        return self

    def _append_to(self, facts: dict[str, Any]) -> None:
        """Record the existing lines and their facts as earlier ones.

        Raises UserError if they are incomplete, or include the new lines.
        """
        num_lines = len(self._file) - sum(part["lines"] for part in self.earlier)
        if num_lines != self.num_expected:
            raise self._error(
                f"the previous command has written only {num_lines} of {self.num_expected} lines, "
                "and --append needs all of them",
                "output-lines-missing",
                fix="rerun the previous command to complete them",
            )
        self.earlier = [*self.earlier, {**facts, "lines": num_lines}]
        if any({**self.facts, "lines": part["lines"]} == part for part in self.earlier):
            raise self._error(
                "the file already contains these answers, followed by answers of other commands",
                "output-lines-duplicate",
                fix="use another --seed or other prompts",
            )

    def _open_locked(self) -> LineFile:
        """Open and lock the file. An old file stays locked until the new one is locked."""
        try:
            if not (self.fresh and self.path.exists()):
                return LineFile(self.path, lock=True, sync=False)
            with LineFile(self.path, lock=True):
                self._rename_old()
                return LineFile(self.path, lock=True, sync=False)
        except InUseError:
            raise self._error(
                "another command is writing this file",
                "output-locked",
                fix="wait until it ends, or choose another --out file",
            ) from None

    def _rename_old(self) -> None:
        """Rename the file, and those of its facts and checksums, to the first free name."""
        names = (self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}") for n in count(1))
        target = rename(
            self.path,
            (p for p in names if not (_facts_path(p).exists() or _checksum_path(p).exists())),
        )
        for old, new in (
            (self.facts_path, _facts_path(target)),
            (self.checksum_path, _checksum_path(target)),
        ):
            if old.exists():
                rename(old, [new])

    def _count_finished(self, num_lines: int) -> int:
        present = len(self._file) - self.num_appended_to
        if present < 0:
            raise self._error(f"{-present} lines of the file are missing", "output-lines-missing")
        if present > num_lines:
            raise self._error(
                f"the file has {present} lines, but this command writes only {num_lines}",
                "output-lines-extra",
            )
        return present if present == num_lines else present - present % self.window

    def _lines(self) -> Iterator[bytes]:
        """The complete lines of the file."""
        with self.path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def read(self) -> Iterator[dict[str, Any]]:
        """The lines to keep. Raises UserError for a line that was changed."""
        checksums = self.checksum_path.read_bytes().splitlines()
        start = self.num_appended_to
        for number, line in enumerate(
            islice(self._lines(), start, start + self.num_existing), 1 + start
        ):
            if number > len(checksums) or checksums[number - 1] != _checksum(line):
                raise self._error(
                    "this line has changed since it was written (its checksum is wrong)",
                    "output-line-damaged",
                    number,
                    fix="restore this line; or remove it and all lines below it, then rerun the "
                    f"same command; or {START_OVER}",
                )
            try:
                value = json.loads(line.decode())
            except (ValueError, RecursionError):
                raise self.foreign_line(number) from None
            if not isinstance(value, dict):
                raise self.foreign_line(number)
            yield value

    def foreign_line(self, number: int) -> UserError:
        """The error for a line (counted from 1) that this command did not write."""
        return self._error(
            "this line was not written by this command", "output-line-foreign", number
        )

    def _writing(self) -> AbstractContextManager[None]:
        return writing(
            self.path,
            "free disk space or make the file writable, then rerun the same command to resume; or "
            "choose another --out file",
        )

    def _error(
        self, message: str, code: str, line: int | None = None, *, fix: str = START_OVER
    ) -> UserError:
        where = str(self.path) if line is None else f"{self.path}:{line}"
        return UserError(message, code=code, where=where, fix=fix)

    def truncate(self, about: Mapping[str, Any]) -> None:
        """Save the facts, and truncate the file to the lines to keep."""
        with self._writing():
            earlier = {EARLIER: self.earlier} if self.earlier else {}
            content = {**self.facts, **earlier, ABOUT: {**about, "lines": self.num_expected}}
            text = json.dumps(add_checksum(content), indent=1, ensure_ascii=False)
            atomic_write(self.facts_path, text)
            num_lines = self.num_appended_to + self.num_existing
            self._file.truncate(num_lines)
            self._checksums.truncate(num_lines)

    def write(self, lines: Sequence[str]) -> None:
        """Append complete windows."""
        encoded = [f"{line}\n".encode() for line in lines]
        with self._writing():
            self._checksums.write([_checksum(line) + b"\n" for line in encoded])
            self._file.write(encoded)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._checksums.close()
        self._file.close()


def _difference(name: str, stored: Any, value: Any) -> str:
    """How a fact differs from that of the existing lines."""
    if name not in DIGESTS:
        before, now = (json.dumps(v, ensure_ascii=False) for v in (stored, value))
        return f"the existing lines were written with {name} {before}, but {name} is now {now}"
    if stored is None or value is None:
        before, now = ("without" if v is None else "with" for v in (stored, value))
        return f"the existing lines were written {before} a {DIGESTS[name]}, but now there is " + (
            "none" if now == "without" else "one"
        )
    return f"the existing lines were written with another {DIGESTS[name]}"


def check_output(path: Path, *, is_new: bool = False) -> None:
    """Raise UserError unless JSON Lines can be written to this path. is_new: it must not exist."""
    check_path(path)
    if path.suffix not in (".jsonl", ".ndjson"):
        raise UserError(
            "the output is JSON Lines, so the file name must end in .jsonl or .ndjson",
            code="output-not-jsonl",
            where=str(path),
            fix="use a file name that ends in .jsonl",
        )
    if is_new and path.exists():
        raise UserError(
            "the file already exists",
            code="path-exists",
            where=str(path),
            fix="choose another --out file, or move this one away",
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(
            "the path is a folder" if path.is_dir() else f"the folder {path.parent} does not exist",
            code="path-invalid-output",
            where=str(path),
            fix="choose a file in an existing folder",
        )


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[str]) -> None:
    """Raise UserError for a file that is both an input and an output."""
    output_paths = {path.resolve() for path in outputs}
    for path in inputs:
        if os.path.exists(path) and Path(path).resolve() in output_paths:
            raise UserError(
                "the file cannot be both input and output",
                code="output-is-input",
                where=path,
                fix="choose another --out file",
            )


def as_line(value: Mapping[str, Any]) -> str:
    """One line, without its end; values that JSON does not support are written as text.

    Raises ValueError for a number that is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)


def check_line(value: Mapping[str, Any], origin: object) -> None:
    """Raise UserError for a row that cannot be written as a line."""
    try:
        as_line(value)
    except ValueError as error:
        raise UserError(
            f"the row cannot be written as JSON ({error})",
            code="row-not-json",
            where=str(origin),
            fix="replace NaN and infinite numbers in this row with null",
        ) from None


def replace_file(path: Path, content: str) -> None:
    """Write a whole file in one step. Raises UserError (file-not-writable)."""
    fix = "free disk space or make the folder writable, then rerun the same command to resume"
    with writing(path, fix):
        atomic_write(path, content)


def _facts_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.about.json")


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.crc")


def _checksum(line: bytes) -> bytes:
    """The CRC-32 of a line with its end, as in the checksum file."""
    return b"%08x" % crc32(line)
