"""The output files of imports: all votes, their rows, and a description of both.

The rows depend only on the votes. A new state is first written to temporary files; then the
description is replaced by one with the checksums of both states, then the votes, then the rows. An
import that is killed leaves each file in its old or its new state, and the next one writes the rows
again.

A service that receives single votes appends each of them to a file of pending votes, in constant
time. The next new state includes them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from valence.data.importers.records import Vote
from valence.data.importers.rows import ROW_KINDS, ImportedRows, RowKind, latest_votes
from valence.errors import UserError
from valence.files import check_path, refuse_links
from valence.jobs.row_job import as_line
from valence.storage import (
    Journal,
    add_checksum,
    atomic_write,
    lock_file,
    part_path,
    publish,
    read_json,
    verify,
    write_part,
)
from valence.version import __version__

ELSEWHERE = "choose another file with --out"
PREVIOUS = "previous"
"""Key of the description: checksums of the state that an interrupted import was replacing."""


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """The outcomes of the votes that were read. superseded: by later ones among them. withdrawn:
    votes of earlier imports that no longer count.
    """

    new: int
    replaced: int
    unchanged: int
    superseded: int
    withdrawn: int = 0


def vote_line(vote: Vote) -> str:
    """A vote as a line of the file of votes. Raises ValueError if JSON cannot represent it."""
    line = as_line(vote.to_dict())
    line.encode()
    return line


def merge_votes(stored: Sequence[Vote], votes: Sequence[Vote]) -> tuple[list[Vote], MergeCounts]:
    """Add new votes to the stored ones. They replace votes with their id or key that are not newer.

    A replacement has the position of the replaced vote; other new votes follow in their order.
    Adding the same votes again changes nothing. Several new votes may have one id: comparisons with
    several completions. A vote without a verdict withdraws the votes with its id or key, and is
    stored in their position, so that an older export does not restore them.
    """
    latest = latest_votes(votes)
    newest = {_id(vote): vote for vote in latest}
    incoming = {
        vote.key: vote for vote in latest if vote.has_verdict == newest[_id(vote)].has_verdict
    }
    place = {vote.key: number for number, vote in enumerate(stored)}
    merged: dict[int, Vote] = dict(enumerate(stored))
    keys_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for vote in stored:
        keys_of[_id(vote)].add(vote.key)
    order = {key: len(stored) + number for number, key in enumerate(incoming)}
    new = replaced = unchanged = withdrawn = 0
    # newest first: a vote older than a stored one is ignored even if another one replaces that
    for key, vote in sorted(incoming.items(), key=lambda item: -item[1].updated_at):
        stale = {other for other in keys_of[_id(vote)] if other not in incoming}
        rivals = sorted(place[other] for other in {key, *stale} if other in place)
        if any(merged[number].updated_at > vote.updated_at for number in rivals):
            unchanged += vote.has_verdict
            continue
        stored_position = place.get(key)
        counted = [number for number in rivals if merged[number].has_verdict]
        if stored_position is not None and _is_equal(merged[stored_position], vote):
            unchanged += vote.has_verdict
            position = stored_position
        else:
            if not vote.has_verdict:
                withdrawn += len(counted)
            elif counted:
                replaced += 1
            else:
                new += 1
            position = rivals[0] if rivals else order[key]
            merged[position] = vote
        for number in rivals:
            if number != position:
                del merged[number]
        for other in stale:
            place.pop(other, None)
        place[key] = position
    superseded = sum(vote.has_verdict for vote in votes)
    superseded -= sum(vote.has_verdict for vote in incoming.values())
    counts = MergeCounts(new, replaced, unchanged, superseded, withdrawn)
    return [merged[number] for number in sorted(merged)], counts


def _id(vote: Vote) -> tuple[str, str]:
    return vote.source, vote.id


def _is_equal(a: Vote, b: Vote) -> bool:
    """Whether votes differ at most in the file that they were read from."""
    return vote_line(replace(a, origin=b.origin)) == vote_line(b)


class ImportStore:
    """The files of an --out, locked by this process inside ``with store.locked()``.

    votes: those of earlier imports, and pending ones. main: the kind of rows in --out itself, None
    before the first import. has_unlabelled: whether rows without a label were asked for, then or
    now. num_pending: votes in the file of pending votes. overwrite: replace row files that were
    edited, or that no import wrote.
    """

    def __init__(self, out: Path, *, overwrite: bool = False) -> None:
        check_path(out)
        if out.suffix not in (".jsonl", ".ndjson"):
            raise UserError(
                "the output is JSON Lines, so the file name must end in .jsonl or .ndjson",
                code="output-not-jsonl",
                where=str(out),
                fix="use a file name that ends in .jsonl",
            )
        if out.is_dir() or not out.parent.is_dir():
            problem = (
                "the path is a folder"
                if out.is_dir()
                else f"the folder {out.parent} does not exist"
            )
            raise UserError(
                problem,
                code="path-invalid-output",
                where=str(out),
                fix="choose a file in an existing folder",
            )
        self.out, self.overwrite = out, overwrite
        self.votes_path = self._sibling_path("votes", out.suffix)
        self.about_path = self._sibling_path("about", ".json")
        self.pending_path = self._sibling_path("pending", out.suffix)
        self.votes: list[Vote] = []
        self.main: RowKind | None = None
        self.has_unlabelled = False
        self._about: dict[str, Any] = {}

    def _sibling_path(self, name: str, suffix: str) -> Path:
        return self.out.with_name(f"{self.out.stem}.{name}{suffix}")

    def rows_path(self, kind: RowKind, main: RowKind) -> Path:
        """The file of a kind of rows."""
        return self.out if kind == main else self._sibling_path(kind, self.out.suffix)

    @property
    def paths(self) -> list[Path]:
        """All files that imports may write."""
        rows = [self._sibling_path(kind, self.out.suffix) for kind in ROW_KINDS]
        return [self.about_path, self.votes_path, self.out, *rows]

    @contextmanager
    def locked(self) -> Iterator[ImportStore]:
        """Lock the files, and read the earlier votes.

        Raises UserError if another import has locked the files, or they were edited.
        """
        with ExitStack() as stack:
            with self._file_errors():
                lock = lock_file(self.out.with_name(f".{self.out.name}.lock"))
                if not stack.enter_context(lock):
                    raise UserError(
                        "another import is writing this file",
                        code="output-locked",
                        where=str(self.out),
                        fix="wait until it ends, or choose another --out file",
                    )
                self._pending = stack.enter_context(
                    Journal(self.pending_path, Vote.from_dict, self._damaged_vote, create=False)
                )
                self._read()
            yield self

    @contextmanager
    def _file_errors(
        self,
        fix: str = "free disk space, make the file readable and writable, or choose another --out; "
        "then rerun the command",
    ) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"the file cannot be read or written ({error.strerror})",
                code="file-not-writable",
                where=str(error.filename or self.out),
                fix=fix,
            ) from error

    # The state on the disk

    def _read(self) -> None:
        for path in (*self.paths, self.pending_path):
            refuse_links(path, path.parent)
        self._about = self._read_about()
        self.main = self._about.get("main")
        self.has_unlabelled = bool(self._about.get("unlabelled"))
        for path in self.paths[1:]:
            self._check_unedited(path)
        if self.votes_path.exists():
            self.votes = list(self._stored_votes())
        if pending := list(self._pending):
            self.votes, _ = merge_votes(self.votes, pending)

    def _known(self, path: Path) -> list[str]:
        """Checksums of a file as imports wrote it."""
        states = [self._about.get("files", {}), self._about.get(PREVIOUS, {})]
        return [state[path.name]["sha256"] for state in states if path.name in state]

    def _read_about(self) -> dict[str, Any]:
        try:
            about = read_json(self.about_path)
            if not isinstance(about, dict):
                raise ValueError("not a JSON object")
            about = verify(about, required=True)
            if about.get("main") not in ROW_KINDS or not isinstance(about.get("files"), dict):
                raise ValueError("not the description of an import")
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"this file is damaged ({error})",
                code="output-state-damaged",
                where=str(self.about_path),
                fix=f"restore it from a backup, or {ELSEWHERE} and import all exports again",
            ) from error
        return about

    def _check_unedited(self, path: Path) -> None:
        """Raise UserError if the file of votes or of rows was changed since an import wrote it."""
        known, is_votes = self._known(path), path == self.votes_path
        if is_votes and known and not path.exists():
            # unless the first import was killed before it wrote them
            if PREVIOUS not in self._about or path.name in self._about[PREVIOUS]:
                raise UserError(
                    "this file with the votes of earlier imports is missing",
                    code="output-lines-missing",
                    where=str(path),
                    fix=f"restore this file; or, to start over, delete {self.about_path} and "
                    "import all exports again with --overwrite",
                )
        elif is_votes and not known and path.exists():
            raise self._foreign(path, ELSEWHERE)
        elif known and path.exists() and _sha256(path.read_bytes()) not in known:
            if self.overwrite and not is_votes:
                return
            fix = (
                f"restore it, or {ELSEWHERE} and import all exports again"
                if is_votes
                else f"{ELSEWHERE}, or discard the changes in the file with --overwrite"
            )
            raise UserError(
                "the file was changed since the last import",
                code="output-edited",
                where=str(path),
                fix=fix,
            )

    def _foreign(self, path: Path, fix: str) -> UserError:
        return UserError(
            "the file exists and was not written by `valence import`, `collect` or `serve`",
            code="output-foreign",
            where=str(path),
            fix=fix,
        )

    def _stored_votes(self) -> Iterator[Vote]:
        with self.votes_path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield Vote.from_dict(json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise UserError(
                        f"this version of Valence cannot read this vote ({error})",
                        code="output-line-foreign",
                        where=f"{self.votes_path}:{number}",
                        fix=f"update Valence, or {ELSEWHERE} and import all exports again",
                    ) from error

    # Pending votes

    def append(self, vote: Vote) -> None:
        """Add a vote to the file of pending votes. It is on the disk when this returns.

        Raises UserError when it cannot be written; the file is then as it was.
        """
        with self._file_errors("free disk space, then vote again"):
            self._pending.append(vote.to_dict())

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def _damaged_vote(self, number: int, error: Exception) -> UserError:
        return UserError(
            f"this line is not a vote ({error})",
            code="output-line-damaged",
            where=f"{self.pending_path}:{number}",
            fix=f"remove this line, or {ELSEWHERE}",
        )

    # A new state

    def write(
        self,
        votes: Sequence[Vote],
        imported: ImportedRows,
        main: RowKind,
        *,
        pending: int | None = None,
    ) -> dict[str, int]:
        """Write the votes, their rows and the description, if anything has changed.

        pending: number of pending votes that are included in ``votes``; None: all of them.

        Returns the number of rows by file name.
        """
        pending = self.num_pending if pending is None else pending
        contents = {self.votes_path: _lines(vote_line(vote) for vote in votes)}
        counts: dict[str, int] = {}
        for kind in ROW_KINDS:
            if imported.rows[kind]:
                path = self.rows_path(kind, main)
                contents[path] = _lines(map(as_line, imported.rows[kind]))
                counts[path.name] = len(imported.rows[kind])
        self.refuse_foreign(contents)
        about = self._describe(votes, main, contents, counts)
        with self._file_errors():
            try:
                self._replace(contents, about)
            except OSError:
                self._remove_parts()
                raise
            self._pending.remove_first(pending)
        return counts

    def refuse_foreign(self, paths: Iterable[Path]) -> None:
        """Raise UserError for a file that no import wrote, unless overwriting is allowed."""
        for path in paths:
            if path.exists() and not self._known(path) and not self.overwrite:
                raise self._foreign(
                    path,
                    f"{ELSEWHERE}, move this file away, or replace it with --overwrite",
                )

    def _replace(self, contents: Mapping[Path, bytes], about: Mapping[str, Any]) -> None:
        """Replace the old state by a new one, in the order that this module describes."""
        managed = [path for path in self.paths[1:] if path in contents or self._known(path)]
        current = {
            path.name: {"sha256": _sha256(path.read_bytes())} for path in managed if path.exists()
        }
        new = {path.name: {"sha256": _sha256(content)} for path, content in contents.items()}
        if self._about == json.loads(json.dumps(about)) and current == new:
            return
        for path, content in contents.items():
            write_part(path, content)
        self._replace_about({**about, PREVIOUS: current})
        for path in contents:
            publish(path)
        for path in managed:
            if path not in contents:
                path.unlink(missing_ok=True)
        self._remove_parts()
        self._replace_about(about)
        self._about = json.loads(json.dumps(about))  # as the next import will read it

    def _remove_parts(self) -> None:
        """Remove temporary files, also those of a killed import."""
        for path in (*self.paths, self.pending_path):
            part_path(path).unlink(missing_ok=True)

    def _describe(
        self,
        votes: Sequence[Vote],
        main: RowKind,
        contents: Mapping[Path, bytes],
        counts: Mapping[str, int],
    ) -> dict[str, Any]:
        files: dict[str, set[str]] = defaultdict(set)
        for vote in votes:
            files[vote.source].add(vote.origin.path)
        num_votes = Counter(vote.source for vote in votes if vote.has_verdict)
        times = [vote.updated_at for vote in votes if vote.updated_at and vote.has_verdict]
        return {
            "valence": __version__,
            "main": main,
            **({"unlabelled": True} if self.has_unlabelled else {}),
            "sources": {
                name: {"files": sorted(files[name]), "votes": num_votes[name]}
                for name in sorted(files)
            },
            "votes": num_votes.total(),
            "raters": len({(vote.source, vote.rater) for vote in votes if vote.rater}),
            "from": as_date(min(times)) if times else None,
            "to": as_date(max(times)) if times else None,
            "files": {
                path.name: {
                    "lines": counts.get(path.name, len(votes)),
                    "sha256": _sha256(content),
                }
                for path, content in contents.items()
            },
        }

    def _replace_about(self, about: Mapping[str, Any]) -> None:
        text = json.dumps(add_checksum(about), indent=1, ensure_ascii=False)
        atomic_write(self.about_path, f"{text}\n")


def as_date(seconds: float) -> str:
    """Seconds since 1970 as an ISO date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
