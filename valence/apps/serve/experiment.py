"""An A/B test of two runs: who gets which one, the file of votes, and the result."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from valence.apps.serve.sequential import (
    ALPHA,
    MIN_VOTES,
    SequentialResult,
    rate_interval,
    sequential_test,
)
from valence.errors import UserError
from valence.storage import Journal, read_journal, writing

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")


@dataclass(frozen=True)
class ServedRun:
    """A run, and the optimizer step and digest of its weights. digest: empty in older files."""

    run: str
    step: int
    digest: str = ""


@dataclass(frozen=True)
class Assignment:
    """The side that a user or conversation gets.

    test: identifies the A/B test. unit: digest of the user or conversation.
    """

    test: str
    unit: str
    side: Side

    @property
    def index(self) -> int:
        return SIDES.index(self.side)


@dataclass(frozen=True)
class AbPlan:
    """The first line of the file: what must not change during a test.

    share: part of the units that gets side b.
    """

    test: str
    salt: str
    share: float
    runs: tuple[ServedRun, ServedRun]

    def assign(self, unit: str) -> Assignment:
        """The side of a user or conversation, which is always the same."""
        digest = hashlib.sha256(f"{self.salt}/{unit}".encode()).digest()
        position = int.from_bytes(digest[:8]) / 2**64
        return Assignment(self.test, digest[8:16].hex(), "b" if position < self.share else "a")


@dataclass(frozen=True)
class AbVote:
    """A vote of a rater on a completion. label: None withdraws an earlier one."""

    completion: str
    rater: str
    unit: str
    side: Side
    label: bool | None
    time: float


@dataclass(frozen=True)
class SideResult:
    """The votes of one side.

    thumbs_up, thumbs_down: the last vote of each rater on each completion. votes, ups: the first
    vote of each unit, which is what the test counts. interval: of the rate ups / votes.
    """

    run: str
    step: int
    thumbs_up: int
    thumbs_down: int
    votes: int
    ups: int
    rate: float | None
    interval: tuple[float, float]


@dataclass(frozen=True)
class AbResult:
    """The result of an A/B test so far. better: None while no difference is established."""

    a: SideResult
    b: SideResult
    share: float
    alpha: float
    better: Side | None
    established_at: int | None
    e_values: tuple[float, float]
    threshold: float
    votes_left: int | None

    @property
    def verdict(self) -> str:
        """The result in words."""
        num = self.a.votes + self.b.votes
        if self.better is not None:
            return (
                f"{self.better.upper()} is better: established after {self.established_at} votes "
                f"(error probability at most {self.alpha:.0%}, however often you look)"
            )
        if min(self.a.votes, self.b.votes) < MIN_VOTES:
            return (
                f"not established yet: each side needs votes of at least {MIN_VOTES} users "
                f"(A: {self.a.votes}, B: {self.b.votes})"
            )
        if self.votes_left is None:
            return (
                f"not established after {num} votes: at the present rates the sides hardly differ"
            )
        return f"not established yet: at the present rates about {self.votes_left} more votes"

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {**asdict(self), "verdict": self.verdict, "min_votes": MIN_VOTES}


class Experiment:
    """The file of an A/B test: its plan, and an append-only log of votes.

    Raises UserError for a file of a test of other runs, or with another share.
    """

    def __init__(self, path: Path, runs: tuple[ServedRun, ServedRun], share: float) -> None:
        self.path = path
        self._lock = threading.Lock()
        with writing(path, "set --out to another file"):
            self._journal = Journal(path, dict, partial(_foreign, path))
        with ExitStack() as failing:
            failing.callback(self.close)
            if records := list(self._journal):
                self.plan, self._votes = _parse(path, records)
                self._check_plan(runs, share)
            else:
                salt = secrets.token_hex(16)
                self.plan = AbPlan(secrets.token_hex(8), salt, share, runs)
                self._votes = list[AbVote]()
                self._append(asdict(self.plan))
            failing.pop_all()

    def _check_plan(self, runs: tuple[ServedRun, ServedRun], share: float) -> None:
        for before, now in zip(self.plan.runs, runs, strict=True):
            if (before.run, before.step) != (now.run, now.step):
                raise UserError(
                    f"this is an A/B test of {before.run} at step {before.step}, not of {now.run} "
                    f"at step {now.step}",
                    code="ab-runs-changed",
                    where=str(self.path),
                    fix="pass the same runs (and --step), or start a new test with another --out",
                )
            if before.digest and before.digest != now.digest:
                raise UserError(
                    f"the weights of {now.run} at step {now.step} have changed since this A/B test "
                    "started",
                    code="ab-weights-changed",
                    where=str(self.path),
                    fix="restore the weights, or start a new test with another --out",
                )
        if self.plan.share != share:
            raise UserError(
                f"this A/B test gives side B a share of {self.plan.share:g}, not {share:g}",
                code="ab-share-changed",
                where="--share",
                fix=f"use --share {self.plan.share:g}, or start a new test with another --out",
            )

    @property
    def result(self) -> AbResult:
        with self._lock:
            votes = list(self._votes)
        return result_of(self.plan, votes)

    def vote(self, assignment: Assignment, completion: str, rater: str, label: bool | None) -> None:
        """Record a vote. It is on the disk when this returns. A completion of another test does not
        count.

        Raises UserError when it cannot be written; the file is then as it was.
        """
        if assignment.test != self.plan.test:
            return
        vote = AbVote(completion, rater, assignment.unit, assignment.side, label, time.time())
        with self._lock:
            self._append(asdict(vote))
            self._votes.append(vote)

    def _append(self, record: Mapping[str, Any]) -> None:
        with writing(self.path, "free disk space, then vote again"):
            self._journal.append(record)

    def close(self) -> None:
        self._journal.close()


def ab_path(out: Path) -> Path:
    """The file of the A/B test that belongs to a file of rows."""
    return out if out.name.endswith(".ab.jsonl") else out.parent / f"{out.stem}.ab.jsonl"


def read_result(out: Path) -> AbResult:
    """The result of the A/B test of a file of rows, which a server may be writing.

    Raises UserError when there is none.
    """
    path = ab_path(out)
    try:
        records = list(read_journal(path, dict, partial(_foreign, path)))
    except OSError as error:
        raise UserError(
            f"there is no A/B test ({error.strerror})",
            code="ab-test-missing",
            where=str(path),
            fix="pass the --out file of a `valence serve` with two runs",
        ) from error
    if not records:
        raise _foreign(path, 1, "it is empty")
    return result_of(*_parse(path, records))


def result_of(plan: AbPlan, votes: Sequence[AbVote]) -> AbResult:
    """Count the votes of a test.

    The test counts one vote of each unit, the first one: an observation must not change after the
    test has been looked at.
    """
    last: dict[tuple[str, str], AbVote] = {}
    first: dict[str, AbVote] = {}
    for vote in votes:
        last[vote.completion, vote.rater] = vote
        if vote.label is not None:
            first.setdefault(vote.unit, vote)
    counted = list(first.values())
    test = sequential_test(
        [SIDES.index(vote.side) for vote in counted], [bool(vote.label) for vote in counted]
    )
    a, b = (
        _side_result(run, side, list(last.values()), counted)
        for run, side in zip(plan.runs, SIDES, strict=True)
    )
    return _ab_result(plan, a, b, test)


def _side_result(
    run: ServedRun, side: Side, last: Sequence[AbVote], counted: Sequence[AbVote]
) -> SideResult:
    labels = [vote.label for vote in last if vote.side == side]
    first = [vote.label for vote in counted if vote.side == side]
    ups = first.count(True)
    return SideResult(
        run=run.run,
        step=run.step,
        thumbs_up=labels.count(True),
        thumbs_down=labels.count(False),
        votes=len(first),
        ups=ups,
        rate=ups / len(first) if first else None,
        interval=rate_interval(ups, len(first)),
    )


def _ab_result(plan: AbPlan, a: SideResult, b: SideResult, test: SequentialResult) -> AbResult:
    return AbResult(
        a=a,
        b=b,
        share=plan.share,
        alpha=ALPHA,
        better=None if test.better is None else SIDES[test.better],
        established_at=test.established_at,
        e_values=test.e_values,
        threshold=test.threshold,
        votes_left=test.votes_left,
    )


def _parse(path: Path, records: Sequence[Mapping[str, Any]]) -> tuple[AbPlan, list[AbVote]]:
    number = 1
    try:
        plan = dict(records[0])
        a, b = (ServedRun(**run) for run in plan.pop("runs"))
        votes = list[AbVote]()
        for number, record in enumerate(records[1:], 2):  # noqa: B007
            votes.append(AbVote(**record))
        return AbPlan(**plan, runs=(a, b)), votes
    except (TypeError, ValueError, KeyError) as error:
        raise _foreign(path, number, error) from error


def _foreign(path: Path, number: int, error: object) -> UserError:
    return UserError(
        f"this line is not a record of an A/B test ({error})",
        code="output-line-foreign",
        where=f"{path}:{number}",
        fix="restore the file from a backup, or use another file",
    )
