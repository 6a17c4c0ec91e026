"""Review suspicious rows: the rows to decide on, the decisions, and the reviewed file.

Decisions go to ``NAME.decisions.jsonl``, an append-only log. A decision is on the disk when the
method that records it returns. The reviewed file is written from the rows and this log, and can be
rewritten at any time. A line of the log is a decision, an undo, or the checksum of a reviewed
file that is about to be written.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from valence.apps.feedback.audit_labels import RatedRow, RowAudit, with_column, with_info
from valence.data.formats import lookup
from valence.data.label_audit import content_text
from valence.data.values import thumb
from valence.errors import UserError
from valence.files import refuse_links
from valence.jobs.row_job import as_line
from valence.storage import InUseError, Journal, atomic_write, writing
from valence.types import Chat, Content, Judgement, content_id

Choice = Literal["keep", "flip", "drop", "score"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

CASE_ROWS = 6
"""Maximum number of rows that are shown together."""

IDLE_RATIO = 20
"""Minimum pause after a write of the reviewed file, as a multiple of its duration."""

ELSEWHERE = "choose another file with --out"


# The rows to review


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a row is suspicious.

    related: indices of rows that it contradicts or nearly repeats; of several with equal content,
    the first.
    """

    reason: Literal["contradiction", "near_duplicate", "model", "raters"]
    text: str
    related: tuple[int, ...] = ()


Case = tuple[int, ...]
"""Indices of rows that are shown together."""


def find_suspicions(result: RowAudit) -> dict[int, list[Suspicion]]:
    """The suspicious rows of an audit by their index, each with all reasons.

    Rows with the opposite label of a row with the same content, or with nearly the same completion;
    rows with a label that the model contradicts; rows with disagreeing raters.
    """
    suspicions: dict[int, list[Suspicion]] = defaultdict(list)
    groups: dict[str, list[RatedRow]] = defaultdict(list)
    for row in result.rows.all_rated:
        groups[row.group].append(row)
    for group in groups.values():
        sides = [[row for row in group if row.direction is side] for side in (True, False)]
        if all(sides):
            for rows, opposite in (sides, sides[::-1]):
                origins = _origins(opposite)
                text = (
                    f"The same pair is preferred the other way round in {origins}."
                    if group[0].kind == "pairs"
                    else f"The same completion has the opposite label in {origins}."
                )
                reason = Suspicion("contradiction", text, (opposite[0].index,))
                for row in rows:
                    suspicions[row.index].append(reason)
    by_example = {id(row.example): row for row in result.rows.all_rated}
    similar: dict[int, list[tuple[RatedRow, float]]] = defaultdict(list)
    for pair in result.near_duplicates:
        up, down = by_example[id(pair.up)], by_example[id(pair.down)]
        similar[up.index].append((down, pair.similarity))
        similar[down.index].append((up, pair.similarity))
    for index, duplicates in similar.items():
        text = (
            f"A nearly identical completion has the opposite label in "
            f"{_origins([row for row, _ in duplicates])} (similarity "
            f"{max(similarity for _, similarity in duplicates):.2f})."
        )
        reason = Suspicion("near_duplicate", text, tuple(row.index for row, _ in duplicates))
        suspicions[index].append(reason)
    for row in result.rows.all_rated:
        probability = result.probabilities.get(row.index, 1.0)
        if probability < 0.5:
            opposite_label = _label_text(row.label_name(not row.label))
            text = f"The model predicts {opposite_label}, with probability {1 - probability:.2f}."
            suspicions[row.index].append(Suspicion("model", text))
    verdicts = {(vote.source, vote.id): vote for vote in result.votes}
    for row in result.rows.all_rated:
        counts = Counter(_verdict_text(verdicts, row).values())
        if len(counts) > 1:
            votes = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
            suspicions[row.index].append(Suspicion("raters", f"Its raters disagree: {votes}."))
    return dict(suspicions)


def _origins(rows: Sequence[RatedRow]) -> str:
    origins = [str(row.row.origin) for row in rows]
    suffix = f" and {len(origins) - 3:,} more rows" if len(origins) > 3 else ""
    return ", ".join(origins[:3]) + suffix


def _label_text(label: bool | str) -> str:
    return ("up" if label else "down") if isinstance(label, bool) else label


def _verdict_text(votes: Mapping[tuple[str, str], Any], row: RatedRow) -> dict[str, str]:
    """The verdict of each rater of a row, as far as the votes are known."""
    info = row.example.info
    vote_ids = info.get("votes")
    verdicts: dict[str, str] = {}
    for id in vote_ids if isinstance(vote_ids, list) else ():
        vote = votes.get((str(info.get("source")), str(id)))
        if vote is None:
            continue
        rater = vote.rater_hash or str(id)
        if row.kind == "thumbs" and vote.label is not None:
            verdicts[rater] = _label_text(vote.label)
        elif row.kind == "pairs" and vote.winner in ("this", "other"):
            winner = vote.completion if vote.winner == "this" else vote.other
            is_chosen = str((winner or {}).get("content") or "") == row.texts[0]
            verdicts[rater] = "chosen" if is_chosen else "rejected"
        elif row.kind == "pairs" and vote.winner is not None:
            verdicts[rater] = str(vote.winner).replace("_", " ")
    return verdicts


def make_cases(result: RowAudit, suspicions: Mapping[int, Sequence[Suspicion]]) -> list[Case]:
    """The suspicious rows in the order of the review.

    Rows that contradict or nearly repeat each other are in one case, at most CASE_ROWS of them.
    Contradictions come first, then near-duplicates, rows that the model contradicts and rows whose
    raters disagree; among equals, the most suspicious first.
    """
    root = {index: index for index in suspicions}

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    for index, reasons in suspicions.items():
        for reason in reasons:
            for other in reason.related:
                root[find(other)] = find(index)
    components: dict[int, list[int]] = defaultdict(list)
    for index in sorted(suspicions):
        components[find(index)].append(index)

    ranks = {"contradiction": 0, "near_duplicate": 1, "model": 2, "raters": 3}

    def urgency(index: int) -> tuple[int, float, int]:
        rank = min(ranks[reason.reason] for reason in suspicions[index])
        return rank, result.probabilities.get(index, 1.0), index

    cases: list[tuple[tuple[int, float, int], Case]] = []
    sides = {row.index: row.direction for row in result.rows.all_rated}
    for component in components.values():
        for rows in _chunks(sorted(component, key=urgency), sides):
            cases.append((min(map(urgency, rows)), tuple(rows)))
    return [case for _, case in sorted(cases, key=lambda case: case[0])]


def _chunks(rows: Sequence[int], sides: Mapping[int, bool]) -> Iterator[list[int]]:
    """Split a large group into parts that have rows of both sides as far as possible."""
    num_chunks = -(-len(rows) // CASE_ROWS)
    by_side = sorted(rows, key=lambda index: sides[index])  # stable
    chunks = [by_side[start::num_chunks] for start in range(num_chunks)]
    order = {index: position for position, index in enumerate(rows)}
    yield from (sorted(chunk, key=lambda index: order[index]) for chunk in chunks)


# Decisions


@dataclass(frozen=True, slots=True)
class Decision:
    """number: of its line in the log. score: the new score, for the choice "score"."""

    number: int
    choice: Choice
    rater: str
    time: str
    score: float | None = None


@dataclass
class RowState:
    """decisions: those on a row that are not undone. version: the number of changes."""

    decisions: list[Decision] = field(default_factory=list[Decision])
    version: int = 0

    @property
    def current(self) -> Decision | None:
        return self.decisions[-1] if self.decisions else None


class StaleVersionError(Exception):
    """Another rater has decided on the row since it was shown."""


class DecisionLog:
    """An append-only file of JSON lines with checksums, for a single writing process.

    lines: its content. Raises UserError for a file that was not written by a review.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._writing():
                self._journal = Journal(path, _check_log_line, self._damaged, lock=True)
        except InUseError:
            raise UserError(
                "another review is writing this file",
                code="output-locked",
                where=str(path),
                fix=f"use the web page of that review, or stop it, or {ELSEWHERE}",
            ) from None
        with ExitStack() as failing:
            failing.callback(self.close)
            self.lines = list(self._journal)
            failing.pop_all()

    def append(self, line: Mapping[str, Any]) -> int:
        """Add a line and return its number. It is on the disk when this returns.

        Raises UserError when it cannot be written; the file is then as it was.
        """
        with self._writing():
            self._journal.append(line)
        self.lines.append(dict(line))
        return len(self.lines)

    def close(self) -> None:
        self._journal.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, f"free disk space, then repeat the decision; or {ELSEWHERE}")

    def _damaged(self, number: int, error: Exception) -> UserError:
        return UserError(
            f"this line is not a decision of a review ({error})",
            code="output-line-damaged",
            where=f"{self.path}:{number}",
            fix=f"remove this line, or {ELSEWHERE}",
        )


def _check_log_line(line: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a line that was not written by a review."""
    if "choice" in line:
        is_valid = line["choice"] in CHOICES and all(
            isinstance(line.get(name), str) for name in ("row", "rater", "time")
        )
    else:
        is_valid = isinstance(line.get("undo"), int) or isinstance(line.get("wrote"), str)
    if not is_valid:
        raise ValueError("unexpected entries")
    return line


def check_review_path(out: Path) -> Path:
    """The path of the decision log of a reviewed file.

    Raises UserError if the file exists and was not written by a review.
    """
    log = out.with_name(f"{out.stem}.decisions.jsonl")
    if out.exists() and not log.exists():
        raise UserError(
            "the file already exists and was not written by a review",
            code="path-exists",
            where=str(out),
            fix="choose another --out file, or move this one away",
        )
    return log


class LabelReview:
    """The decisions on the suspicious rows of an audit, and the file with the reviewed rows.

    Methods may be called from several threads. cases: in the order of the review. num_obsolete:
    earlier decisions on rows that are not in the files any more; they have no effect.

    Raises UserError when ``out`` is not a file that this review can write, or its rows have
    different columns.
    """

    def __init__(
        self,
        result: RowAudit,
        out: Path,
        *,
        on_error: Callable[[UserError], None] = lambda _: None,
    ) -> None:
        """on_error: called when the reviewed file cannot be written after a decision."""
        self.out, self._on_error = out, on_error
        self.suspicions = find_suspicions(result)
        self.cases = make_cases(result, self.suspicions)
        self._rows = [row.value for row in result.rows.rows]
        self._rated = {row.index: row for row in result.rows.all_rated}
        self._votes = {(vote.source, vote.id): vote for vote in result.votes}
        self._case_of = {index: n for n, case in enumerate(self.cases) for index in case}
        self._check_columns()
        self._opposite = _opposite_labels(self._rated.values())
        self._lock, self._is_closed = threading.Lock(), False
        self._states: dict[int, RowState] = defaultdict(RowState)
        self._by_number: dict[int, tuple[int, Decision]] = {}
        self._histories: dict[str, list[int]] = defaultdict(list)
        keys = _row_keys(self._rows)
        self._keys, index_of = keys, {key: index for index, key in enumerate(keys)}
        self._log = DecisionLog(check_review_path(out))
        with ExitStack() as failing:
            failing.callback(self._log.close)
            self._check_unedited()
            self.num_obsolete = 0
            for number, line in enumerate(self._log.lines, 1):
                if "undo" in line:
                    self._apply_undo(line["undo"])
                elif "choice" in line and line["row"] in index_of:
                    decision = Decision(
                        number, line["choice"], line["rater"], line["time"], line.get("score")
                    )
                    self._apply(index_of[line["row"]], decision)
                elif "choice" in line:
                    self.num_obsolete += 1
            self._lines = [self._line(index) for index in range(len(self._rows))]
            self._last_write = (0.0, 0.0)
            self.flush()
            failing.pop_all()

    def _check_columns(self) -> None:
        columns = {tuple(sorted(row.columns.items())): row for row in self._rated.values()}
        if len(columns) > 1:
            first, second, *_ = columns.values()
            raise UserError(
                f"the rows have other columns than those of {first.row.origin.path}",
                code="rows-of-two-formats",
                where=second.row.origin.path,
                fix="review each file separately, with another --out file",
            )

    def _check_unedited(self) -> None:
        """Raise UserError if the reviewed file was edited."""
        if not self.out.exists():
            return
        refuse_links(self.out, self.out.parent)
        digests = {line["wrote"] for line in self._log.lines if "wrote" in line}
        if hashlib.sha256(self.out.read_bytes()).hexdigest() not in digests:
            raise UserError(
                "the file was changed since the review wrote it",
                code="output-edited",
                where=str(self.out),
                fix=f"move the edited file to another folder and rerun the command; or {ELSEWHERE}",
            )

    # Rows

    def _apply(self, index: int, decision: Decision) -> None:
        state = self._states[index]
        state.decisions.append(decision)
        state.version += 1
        self._by_number[decision.number] = index, decision
        self._histories[decision.rater].append(decision.number)

    def _apply_undo(self, number: int) -> int | None:
        """Undo a decision. Returns the row's index, or None if the row no longer exists."""
        if number not in self._by_number:
            return None
        index, decision = self._by_number[number]
        state = self._states[index]
        state.decisions.remove(decision)
        state.version += 1
        self._histories[decision.rater].remove(number)
        return index

    def decide(
        self,
        index: int,
        choice: Choice,
        rater: str,
        *,
        version: int,
        score: float | None = None,
    ) -> None:
        """Record a decision on a row. version: of the row, as it was shown.

        Raises KeyError for a row that is not reviewed, StaleVersionError if another rater has
        decided since, and UserError for a choice that the row does not allow, or if the decision
        cannot be written.
        """
        if index not in self._case_of:
            raise KeyError(index)
        is_scored = self._rated[index].kind == "scores"
        if choice == ("flip" if is_scored else "score") or (choice == "score") is (score is None):
            scored = "without a score" if score is None else "with a score"
            raise UserError(
                f"{choice} {scored} is not possible for rows with {self._rated[index].kind}",
                code="choice-invalid",
                where="choice",
                fix="keep or drop the row, or set a new score"
                if is_scored
                else "keep, flip or drop the row, without a score",
            )
        with self._lock:
            if self._states[index].version != version:
                raise StaleVersionError
            now = datetime.now(UTC).isoformat(timespec="seconds")
            line: dict[str, Any] = {
                "row": self._keys[index],
                "origin": str(self._rated[index].row.origin),
                "choice": choice,
                "rater": rater,
                "time": now,
                **({} if score is None else {"score": score}),
            }
            number = self._log.append(line)
            self._apply(index, Decision(number, choice, rater, now, score))
            self._changed(index)

    def undo(self, rater: str) -> int | None:
        """Undo the rater's last decision. Returns the row's index, None without a decision."""
        with self._lock:
            if not self._histories[rater]:
                return None
            number = self._histories[rater][-1]
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._log.append({"undo": number, "rater": rater, "time": now})
            index = self._apply_undo(number)
            assert index is not None
            self._changed(index)
            return index

    def _changed(self, index: int) -> None:
        self._lines[index] = self._line(index)
        end, seconds = self._last_write
        if time.monotonic() - end > IDLE_RATIO * seconds:
            try:
                self.flush()
            except UserError as error:  # the decision is on the disk
                self._on_error(error)

    # The reviewed file

    def flush(self) -> None:
        """Write the reviewed file. Raises UserError when it cannot be written."""
        start = time.monotonic()
        content = b"".join(line for line in self._lines if line is not None)
        digest = hashlib.sha256(content).hexdigest()
        # before the file is replaced, so that it can always be recognized
        if not any(line.get("wrote") == digest for line in self._log.lines[-2:]):
            self._log.append({"wrote": digest})
        fix = (
            "free disk space or make the folder writable, then rerun the same command; no decision "
            "is lost"
        )
        with writing(self.out, fix):
            atomic_write(self.out, content)
        end = time.monotonic()
        self._last_write = end, end - start

    def close(self) -> None:
        """Write the reviewed file and release the log. Calling it again has no effect."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                try:
                    self.flush()
                finally:
                    self._log.close()

    def _line(self, index: int) -> bytes | None:
        """The line of a row in the reviewed file; None if it is dropped."""
        value = self._rows[index]
        state = self._states.get(index)
        decision = state.current if state else None
        if decision is not None:
            if decision.choice == "drop":
                return None
            value = self._reviewed(self._rated[index], decision)
        return f"{as_line(value)}\n".encode("utf-8", "backslashreplace")

    def _reviewed(self, row: RatedRow, decision: Decision) -> dict[str, Any]:
        value = dict(row.row.value)
        entry: dict[str, Any] = {
            "decision": decision.choice,
            "by": decision.rater,
            "at": decision.time,
            "was": _verdict_before(row),
        }
        if decision.choice == "score":
            value = with_column(value, row.columns["score"], decision.score)
        elif decision.choice == "flip" and "label" in row.columns:
            label = lookup(value, row.columns["label"])
            value = with_column(value, row.columns["label"], self._opposite[_typed(label)])
        elif decision.choice == "flip":
            value = _swap_sides(value, row.columns)
            margin = lookup(value, row.columns["margin"]) if "margin" in row.columns else None
            if margin:  # it was the margin of the other side
                entry["margin"] = margin
                value = with_column(value, row.columns["margin"], 0)
        return with_info(value, row.columns, "review", entry)

    # What is shown

    def card(self, index: int) -> dict[str, Any]:
        """A row as the page shows it."""
        row, state = self._rated[index], self._states.get(index, RowState())
        decision, example = state.current, row.example
        info = example.info
        verdicts = _verdict_text(self._votes, row)
        raters = info.get("raters") or info.get("rater") or []
        names = [str(name) for name in (raters if isinstance(raters, list | tuple) else [raters])]
        sides = (
            {"completion": example.completion}
            if isinstance(example, Judgement)
            else {"chosen": example.chosen, "rejected": example.rejected}
        )
        tags = info.get("tags")
        return {
            "row": index,
            "version": state.version,
            "kind": row.kind,
            "origin": str(row.row.origin),
            "prompt": _messages(example.prompt, row.row.value.get("prompt")),
            "sides": [
                {"name": name, "messages": _messages(content, row.row.value.get(name))}
                for name, content in sides.items()
            ],
            "label": _label_text(row.label_name(row.label)),
            "opposite": _label_text(row.label_name(not row.label)),
            "score": example.score if isinstance(example, Judgement) else None,
            "raters": [
                {"name": name, "verdict": verdicts.get(name, "")}
                for name in dict.fromkeys([*names, *verdicts])
            ],
            "comment": _truncate(info.get("comment")),
            "tags": [str(tag) for tag in tags] if isinstance(tags, list | tuple) else [],
            "reasons": [
                {"reason": reason.reason, "text": reason.text} for reason in self.suspicions[index]
            ],
            "decision": None
            if decision is None
            else {
                "choice": decision.choice,
                "rater": decision.rater,
                "time": decision.time,
                "score": decision.score,
            },
        }

    def is_reviewed(self, index: int) -> bool:
        """Whether a row is in a case."""
        return index in self._case_of

    def case_of(self, index: int) -> int:
        """The number of a row's case, from 0."""
        return self._case_of[index]

    def is_done(self, number: int) -> bool:
        """Whether all rows of a case are decided."""
        states = (self._states.get(index) for index in self.cases[number])
        return all(state is not None and state.current is not None for state in states)

    def next_case(self, after: int = -1) -> int | None:
        """The next case with an undecided row, continuing with the first after the last case."""
        count = len(self.cases)
        numbers = ((after + 1 + step) % count for step in range(count))
        return next((number for number in numbers if not self.is_done(number)), None)

    def progress(self) -> dict[str, int]:
        """The number of rows by choice, and the number of undecided rows."""
        counts: Counter[str] = Counter()
        for index in self._case_of:
            state = self._states.get(index)
            decision = state.current if state else None
            counts[decision.choice if decision else "left"] += 1
        return {"rows": len(self._case_of), **{name: counts[name] for name in (*CHOICES, "left")}}


def _verdict_before(row: RatedRow) -> Any:
    """The verdict of a row before the review."""
    if row.kind == "scores":
        assert isinstance(row.example, Judgement)
        return row.example.score
    return row.label_name(row.label)


def _row_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that identify each row by its content, and equal rows by their order."""
    counts: Counter[str] = Counter()
    keys: list[str] = []
    for row in rows:
        id = content_id(row)
        counts[id] += 1
        keys.append(f"{id}-{counts[id]}")
    return keys


def _typed(label: Any) -> tuple[str, Any]:
    """A label as a key that distinguishes True from 1."""
    return type(label).__name__, label


def _opposite_labels(rows: Iterable[RatedRow]) -> dict[tuple[str, Any], Any]:
    """The opposite of each label of some rows.

    This is the most frequent opposite label of the same type in these rows, such as "bad" for
    "good", or else True and False, 1 and 0, or "up" and "down".
    """
    counts: dict[bool, Counter[tuple[str, Any]]] = {True: Counter(), False: Counter()}
    for row in rows:
        if "label" in row.columns:
            label = lookup(row.row.value, row.columns["label"])
            verdict = thumb(label)
            if verdict is not None:
                counts[verdict][_typed(label)] += 1
    opposite: dict[tuple[str, Any], Any] = {}
    for verdict, labels in counts.items():
        opposite_labels = [label for label, _ in counts[not verdict].most_common()]
        for key in labels:
            candidates = [label for kind, label in opposite_labels if kind == key[0]]
            default: Any = not verdict
            if key[0] in ("int", "float"):
                default = int(not verdict)
            elif key[0] == "str":
                default = "down" if verdict else "up"
            opposite[key] = candidates[0] if candidates else default
    return opposite


SIDES = (
    ("chosen", "rejected"),
    ("chosen_text", "rejected_text"),
    ("first", "second"),
    ("messages", "rejected"),
)
"""Parts of a row that hold the two sides of a pair."""


def _swap_sides(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A pair with its sides swapped, also in other columns such as ``chosen_model``."""
    if "messages" in columns and isinstance(lookup(value, columns["rejected"]), str):
        *turns, last = lookup(value, columns["messages"])
        content = "content" if "content" in last else "value"
        turns.append({**last, content: lookup(value, columns["rejected"])})
        value = with_column(value, columns["messages"], turns)
        return with_column(value, columns["rejected"], last[content])
    pairs = {(columns[a], columns[b]) for a, b in SIDES if a in columns and b in columns}
    pairs |= {
        (name, other)
        for name in value
        if "chosen" in name and (other := name.replace("chosen", "rejected")) in value
    }
    swapped = value
    for first, second in pairs:
        if lookup(value, first) is not None or lookup(value, second) is not None:
            swapped = with_column(swapped, first, lookup(value, second))
            swapped = with_column(swapped, second, lookup(value, first))
    return swapped


MAX_CHARACTERS = 50_000
"""Maximum characters of a text on the page."""


def _truncate(text: object) -> str:
    content = str(text or "")
    if len(content) <= MAX_CHARACTERS:
        return content
    num_hidden = len(content) - MAX_CHARACTERS
    return f"{content[:MAX_CHARACTERS]}\n[{num_hidden:,} more characters are not shown]"


def _messages(content: Content, text: object) -> list[dict[str, str]]:
    """The turns of a prompt or completion. text: its text if the content is token ids."""
    if isinstance(content, Chat):
        return [
            {
                "role": str(message.get("role", "")),
                "text": _truncate(content_text(replace(content, messages=(message,)))),
            }
            for message in content.messages
        ]
    if isinstance(content, str):
        return [{"role": "", "text": _truncate(content)}]
    turns = text if isinstance(text, list) else [text]
    return [
        {"role": str(turn.get("role", "")), "text": _truncate(turn.get("content"))}
        if isinstance(turn, dict)
        else {"role": "", "text": _truncate(turn)}
        for turn in turns
    ]
