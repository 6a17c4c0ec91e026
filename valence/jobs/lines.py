"""A file of JSON lines that a program which was stopped goes on writing, with what its lines depend
on in a file beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from zlib import crc32

from valence.checksums import add_checksum, verify
from valence.errors import UserError
from valence.files import check_path

ANEW = "name another file, or start anew with --fresh, which moves this one aside"
ABOUT = "about"
"""Of what stands in the file beside, all that the lines do not depend on."""
SUM_BYTES = 9
"""Bytes of a line of checksums."""
EARLIER = "earlier"
"""There, the facts of lines that others were appended to, with how many they are."""


class Lines:
    """Lines that are written so many (``window``) at a time; to go on, only whole windows are kept,
    so that the rest comes out as it would have. Not two programs at once.

    FILE.about.json holds the facts that all lines depend on, and FILE.crc a checksum of each line,
    written before the line. After ``open``, ``read`` gives what is kept; ``go_on`` then cuts the
    rest. append: names of facts; where others differ from those of lines that are complete, new
    lines come after these. anew: what would help where facts differ. Raises UserError where the
    file cannot be had or gone on with, which then stays as it is.
    """

    def __init__(
        self,
        path: Path,
        window: int,
        *,
        fresh: bool = False,
        append: Collection[str] | None = None,
        anew: str = ANEW,
    ) -> None:
        check_path(path)
        if path.suffix not in (".jsonl", ".ndjson"):
            raise UserError(
                "what is written are JSON lines",
                code="output-not-jsonl",
                where=str(path),
                fix="name a file that ends in .jsonl",
            )
        if path.is_dir() or not path.parent.is_dir():
            what = "this is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UserError(
                what,
                code="path-invalid-output",
                where=str(path),
                fix="name a file, new or old, in a folder that exists",
            )
        self.path, self.window, self.fresh, self.append, self.anew = (
            path,
            window,
            fresh,
            append,
            anew,
        )
        self.beside, self.sums = _beside(path), _sums(path)
        self.facts: dict[str, Any] = {}
        self.base = self.kept = self.total = 0
        self.earlier: list[dict[str, Any]] = []
        self.known = None if fresh else self._read_facts()

    def _read_facts(self) -> dict[str, Any] | None:
        """Of the lines that are there; None when there are none."""
        if not _has_content(self.path):
            return None
        try:
            found = json.loads(self.beside.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                found = verify(found)
            self.sums.stat()
        except FileNotFoundError as error:
            what = (
                f"the file was not written by this command (there is no "
                f"{Path(error.filename).name} in its folder)"
            )
            raise UserError(what, code="output-foreign", where=str(self.path), fix=ANEW) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"cannot be read ({error})",
                code="file-not-readable",
                where=str(self.beside),
                fix=ANEW,
            ) from error
        about = found.pop(ABOUT, None) if isinstance(found, dict) else None
        earlier = found.pop(EARLIER, []) if isinstance(about, dict) else None
        if not isinstance(earlier, list) or not all(
            isinstance(e, dict) and isinstance(e.get("lines"), int) for e in earlier
        ):
            raise self._no_facts()
        self.earlier, self.total = earlier, about.get("lines") if isinstance(about, dict) else None
        return found

    def _no_facts(self) -> UserError:
        return UserError(
            f"this does not say what the lines of {self.path} depend on",
            code="output-state-damaged",
            where=str(self.beside),
            fix=ANEW,
        )

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Adds facts. Raises UserError when the lines that are there were made with others."""
        self.facts |= json.loads(json.dumps(facts))
        self._compare()

    def _compare(self) -> None:
        if self.known is None:
            return
        for name, value in self.facts.items():
            if self.known.get(name) != value and (self.append is None or name in self.append):
                was = json.dumps(self.known.get(name), ensure_ascii=False)
                what = (
                    f"its lines were made with another {name} ({was}, and now "
                    f"{json.dumps(value, ensure_ascii=False)})"
                )
                raise UserError(
                    what,
                    code="output-settings-differ",
                    where=f"{self.path} ({name})",
                    fix=self.anew,
                )

    def open(self, total: int) -> Lines:
        """Takes the file, to write all lines up to ``total``; ``kept`` of those that are there
        stay.
        """
        try:
            with ExitStack() as failing:
                self._file = failing.enter_context(self._taken())
                self._sums = failing.enter_context(self.sums.open("ab"))
                self.known = self._read_facts()  # what was true before may be so no more
                self._compare()
                if self.known is not None and self.known.keys() != self.facts.keys():
                    raise self._no_facts()
                if self.known is not None and self.known != self.facts:
                    self._add_to(self.known)
                self.base = sum(part["lines"] for part in self.earlier)
                self.kept = self._count(total)
                self.total = total
                failing.pop_all()
        except OSError as error:
            raise _cannot(self.path, error) from error
        return self

    def _add_to(self, known: dict[str, Any]) -> None:
        """Takes the lines that are there as earlier ones.

        Raises UserError where they are not complete, or the new ones there.
        """
        found = sum(1 for _ in self._whole()) - sum(part["lines"] for part in self.earlier)
        if found != self.total:
            what = f"of the lines that were to be appended to, {found} of {self.total} are there"
            raise UserError(
                what,
                code="output-lines-missing",
                where=str(self.path),
                fix="give their own command once more, which goes on with them",
            )
        self.earlier = [*self.earlier, {**known, "lines": found}]
        if any({**self.facts, "lines": part["lines"]} == part for part in self.earlier):
            raise UserError(
                "these lines are in the file already, before others",
                code="output-lines-duplicate",
                where=str(self.path),
                fix="change --seed or --data",
            )

    def _taken(self) -> IO[bytes]:
        """The file, locked. The lock of an earlier one is held until this one has its own."""
        if not (self.fresh and self.path.exists()):
            return self._locked("ab")
        with self._locked("rb"):
            self._move_aside()
            return self._locked("ab")

    def _locked(self, mode: str) -> IO[bytes]:
        file: IO[bytes] = self.path.open(mode)
        with ExitStack() as failing:
            failing.enter_context(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use() from None
            if not self.path.exists() or not os.path.samestat(
                os.fstat(file.fileno()), self.path.stat()
            ):
                raise self._in_use()  # moved aside before it was locked
            failing.pop_all()
        return file

    def _in_use(self) -> UserError:
        return UserError(
            "another program is writing this file",
            code="output-locked",
            where=str(self.path),
            fix="wait for it",
        )

    def _count(self, total: int) -> int:
        found = sum(1 for _ in self._whole()) - self.base
        if found < 0:
            raise UserError(
                f"{-found} of its lines are gone",
                code="output-lines-missing",
                where=str(self.path),
                fix=ANEW,
            )
        if found > total:
            raise UserError(
                f"the file has {found} lines, and there are only {total} rows",
                code="output-lines-extra",
                where=str(self.path),
                fix=ANEW,
            )
        return found if found == total else found - found % self.window

    def _whole(self) -> Iterator[bytes]:
        """The lines that are there, but not one without an end."""
        with self.path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def read(self) -> Iterator[dict[str, Any]]:
        """The lines that are kept. Raises UserError for one that is not as it was written."""
        sums = self.sums.read_bytes().splitlines()
        for number, line in enumerate(
            islice(self._whole(), self.base, self.base + self.kept), 1 + self.base
        ):
            if number > len(sums) or sums[number - 1] != _sum_of(line):
                what = "this line has changed since it was written (its checksum is wrong)"
                fix = (
                    f"put it back; or remove it and all lines below, and give the same command "
                    f"again; or {ANEW}"
                )
                raise UserError(
                    what, code="output-line-damaged", where=f"{self.path}:{number}", fix=fix
                )
            try:
                found = json.loads(line.decode())
            except (ValueError, RecursionError):
                raise self.foreign(number) from None
            if not isinstance(found, dict):
                raise self.foreign(number)
            yield found

    def foreign(self, number: int) -> UserError:
        """Of a line (from 1) that is not as it was written."""
        return UserError(
            "this line was not written by this command",
            code="output-line-foreign",
            where=f"{self.path}:{number}",
            fix=ANEW,
        )

    def go_on(self, about: Mapping[str, Any]) -> None:
        """Cuts what is not kept. about: facts that may change, for whoever looks into the file
        beside.
        """
        try:
            aside = self.beside.with_name(f".{self.beside.name}.part")
            earlier = {EARLIER: self.earlier} if self.earlier else {}
            said = {**self.facts, **earlier, ABOUT: {**about, "lines": self.total}}
            aside.write_text(
                json.dumps(add_checksum(said), indent=1, ensure_ascii=False), encoding="utf-8"
            )
            aside.replace(self.beside)
            self._file.truncate(
                sum(len(line) for line in islice(self._whole(), self.base + self.kept))
            )
            self._sums.truncate((self.base + self.kept) * SUM_BYTES)
        except OSError as error:
            raise _cannot(self.path, error) from error

    def write(self, lines: Sequence[str]) -> None:
        """Adds one window."""
        try:
            written = [f"{line}\n".encode() for line in lines]
            self._sums.write(b"".join(_sum_of(line) + b"\n" for line in written))
            self._sums.flush()
            self._file.write(b"".join(written))
            self._file.flush()
        except OSError as error:
            raise _cannot(self.path, error) from error

    def _move_aside(self) -> None:
        """Renames the file, and those beside it, to the first free name."""
        names = (self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}") for n in count(1))
        free = next(
            path
            for path in names
            if not any(each.exists() for each in (path, _beside(path), _sums(path)))
        )
        self.path.rename(free)
        for old, new in ((self.beside, _beside(free)), (self.sums, _sums(free))):
            if old.exists():
                old.rename(new)

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._sums:
                self._file.close()
        except OSError as late:  # a window that could not be written is tried once more here
            if error is None:
                raise _cannot(self.path, late) from late


def as_line(value: Mapping[str, Any]) -> str:
    """One line, without its end; what JSON does not know is written as text.

    Raises ValueError for a number that it does not have.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)


def check_line(value: Mapping[str, Any], origin: object) -> None:
    """Raises UserError for a row that cannot be written as a line."""
    try:
        as_line(value)
    except ValueError as error:
        raise UserError(
            f"the row cannot be written as JSON ({error})",
            code="row-not-json",
            where=str(origin),
            fix="correct the row",
        ) from None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.about.json")


def _sums(path: Path) -> Path:
    return path.with_name(f"{path.name}.crc")


def _sum_of(line: bytes) -> bytes:
    """The CRC-32 of a line with its end, as the line of the other file has it."""
    return b"%08x" % crc32(line)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _cannot(path: Path, error: OSError) -> UserError:
    fix = (
        "make room, or name a file that you may write; what is written is kept, and the same "
        "command goes on from there"
    )
    return UserError(
        f"cannot write ({error.strerror})", code="file-not-writable", where=str(path), fix=fix
    )
