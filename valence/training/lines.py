"""A file of JSON lines that a program which was stopped goes on writing, with what its lines depend on in a file beside it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from valence.errors import UserError

ANEW = "name another file, or start anew with --fresh, which moves this one aside"


class Lines:
    """Lines that are written so many (``window``) at a time; to go on, only whole windows are kept, so that the rest comes out as
    it would have. Not two programs at once.

    FILE.about.json holds the facts that all lines depend on. Raises UserError where the file cannot be had or gone on with.
    """

    def __init__(self, path: Path, window: int, *, fresh: bool = False) -> None:
        if path.suffix not in (".jsonl", ".ndjson"):
            raise UserError("what is written are JSON lines", where=str(path), fix="name a file that ends in .jsonl")
        if path.is_dir() or not path.parent.is_dir():
            what = "this is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UserError(what, where=str(path), fix="name a file, new or old, in a folder that exists")
        self.path, self.window, self.fresh = path, window, fresh
        self.beside = _beside(path)
        self.facts: dict[str, Any] = {}
        self.known = {} if fresh or not _has_content(path) else self._read_facts()

    def _read_facts(self) -> dict[str, Any]:
        try:
            return json.loads(self.beside.read_text(encoding="utf-8"))
        except FileNotFoundError:
            what = f"the file was not written by this command (there is no {self.beside.name} beside it)"
            raise UserError(what, where=str(self.path), fix=ANEW) from None
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read ({error})", where=str(self.beside), fix=ANEW) from error

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Adds facts. Raises UserError when the lines that are there were made with others."""
        for name, value in json.loads(json.dumps(facts)).items():
            if self.known and self.known.get(name) != value:
                was = json.dumps(self.known.get(name), ensure_ascii=False)
                what = f"its lines were made with another {name} ({was}, and now {json.dumps(value, ensure_ascii=False)})"
                raise UserError(what, where=str(self.path), fix=ANEW)
            self.facts[name] = value

    def open(self, total: int, about: Mapping[str, Any]) -> int:
        """Opens the file to write all lines up to ``total``, and cuts what is not whole. Returns how many lines are kept.
        about: facts that may change, for whoever looks into the file beside."""
        try:
            if self.fresh:
                self._move_aside()
            self._file: IO[bytes] = self.path.open("ab")
            self._alone()
            self._write_facts(about)
            kept = self._count(total)
            self._file.truncate(sum(len(line) for line in islice(self._whole(), kept)))
        except OSError as error:
            raise _cannot(self.path, error) from error
        return kept

    def _alone(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another program is writing this file", where=str(self.path), fix="wait for it") from None

    def _write_facts(self, about: Mapping[str, Any]) -> None:
        aside = self.beside.with_name(f".{self.beside.name}.part")
        aside.write_text(json.dumps({**self.facts, "about": about}, indent=1, ensure_ascii=False), encoding="utf-8")
        aside.replace(self.beside)

    def _count(self, total: int) -> int:
        found = sum(1 for _ in self._whole())
        if found > total:
            raise UserError(f"the file has {found} lines, and there are only {total} rows", where=str(self.path), fix=ANEW)
        return found if found == total else found - found % self.window

    def _whole(self) -> Iterator[bytes]:
        """The lines that are there, but not one without an end."""
        with self.path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def read(self) -> Iterator[str]:
        """The lines that are there."""
        return (line.decode(errors="replace") for line in self._whole())

    def write(self, lines: Sequence[str]) -> None:
        """Adds one window."""
        try:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
        except OSError as error:
            raise _cannot(self.path, error) from error

    def _move_aside(self) -> None:
        """Renames an earlier file, and the one beside it, to the first free name."""
        if self.path.exists():
            names = (self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}") for n in count(1))
            free = next(path for path in names if not path.exists() and not _beside(path).exists())
            self.path.rename(free)
            if self.beside.exists():
                self.beside.rename(_beside(free))

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.about.json")


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _cannot(path: Path, error: OSError) -> UserError:
    fix = "make room, or name a file that you may write; what is written is kept, and the same command goes on from there"
    return UserError(f"cannot write ({error.strerror})", where=str(path), fix=fix)
