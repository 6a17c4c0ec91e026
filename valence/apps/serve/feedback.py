"""Store the answers of a service and the votes on them in files like those of an import."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from valence.apps.feedback.import_store import ImportStore
from valence.apps.serve.chat import Answer
from valence.apps.serve.prompts import prompt_id
from valence.data.importers import records
from valence.data.importers.records import HashedRater, Vote, hash_rater
from valence.data.importers.rows import RowKind, make_rows, pairs_left_out
from valence.errors import UserError
from valence.rollouts import Sampling
from valence.storage import Journal, writing
from valence.types import Completion, Message, Origin

SOURCE = "valence"
"""The name of this service among the sources of votes."""

RECENT = 1000
"""Maximum number of answers in memory; older ones are read from the file."""

IDLE_RATIO = 10
"""Minimum pause after a write of the rows, as a multiple of its duration."""

Winner = Literal["a", "b", "tie", "both_bad"]
WINNERS: dict[Winner, records.Winner] = {
    "a": "this",
    "b": "other",
    "tie": "tie",
    "both_bad": "both_bad",
}
"""The results of a comparison, and their values in votes."""


@dataclass
class ComparisonResults:
    """The number of wins of two models, and of comparisons without a winner."""

    wins: dict[str, int]
    ties: int = 0
    both_bad: int = 0

    def __str__(self) -> str:
        counts = [f"{model} won {count}" for model, count in self.wins.items()]
        counts += [f"{self.ties} equally good", f"{self.both_bad} both bad"]
        return ", ".join(counts)


class AnswerFile:
    """An append-only file of answers, which can be read by their ids.

    Raises UserError for a file that was not written by this service.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, Answer] = OrderedDict()
        with writing(path, "choose another file with --out"):
            self._journal = Journal(path, _read_answer, self._not_an_answer)
        with ExitStack() as failing:
            failing.callback(self.close)
            self._numbers = {answer.id: i for i, answer in enumerate(self._journal, 1)}
            failing.pop_all()

    def add(self, answer: Answer) -> None:
        """Append an answer. It is on the disk when this returns.

        Raises UserError when it cannot be written; the file is then as it was.
        """
        with self._lock:
            with writing(self.path, "free disk space, then retry"):
                self._journal.append(_answer_line(answer))
            self._numbers[answer.id] = len(self._journal)
            self._recent[answer.id] = answer
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)

    def get(self, id: str) -> Answer:
        """Return an answer. Raises KeyError when there is none with this id."""
        with self._lock:
            if id in self._recent:
                return self._recent[id]
            number = self._numbers[id]
        return self._journal.get(number)

    def origin(self, id: str) -> Origin:
        """Where an answer is in the file. Raises KeyError when there is none with this id."""
        return Origin(self.path.name, self._numbers[id])

    def close(self) -> None:
        self._journal.close()

    def _not_an_answer(self, number: int, error: Exception) -> UserError:
        return UserError(
            f"this line is not the record of an answer ({error})",
            code="output-line-foreign",
            where=f"{self.path}:{number}",
            fix="remove this line, or choose another file with --out",
        )


class FeedbackStore:
    """Answers and votes on disk.

    Answers go to ``NAME.answers.jsonl``, votes to the files of an import. A vote is on the disk,
    as a pending one, when the method that records it returns. A thread writes the rows some
    seconds later. on_error: called in that thread if this fails. pause: minimum seconds before the
    rows are written again. num_votes: votes in the files.

    Raises UserError if the files were not written by this service, or another process writes them.
    """

    def __init__(
        self,
        out: Path,
        *,
        overwrite: bool = False,
        on_error: Callable[[UserError], None] = lambda _: None,
        pause: float = 1.0,
    ) -> None:
        self.out, self._on_error, self._pause = out, on_error, pause
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._changed, self._closing = threading.Event(), threading.Event()
        with ExitStack() as failing:
            self._store = failing.enter_context(ImportStore(out, overwrite=overwrite).locked())
            self._main: RowKind = self._store.main or "thumbs"
            self._store.refuse_foreign(self._store.paths[1:])
            self._answers = AnswerFile(out.with_name(f"{out.stem}.answers.jsonl"))
            failing.callback(self._answers.close)
            self._files = failing.pop_all()
        self._votes: dict[str, Vote] = {}
        self._comparisons: dict[str, Vote] = {}
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._newest = 0.0
        self._num_pairs_left_out = 0
        for vote in self._store.votes:
            self._count(vote)
        if self._store.num_pending:
            self._changed.set()
        self._thread = threading.Thread(target=self._write_rows, name="valence-rows", daemon=True)
        self._thread.start()

    @property
    def num_votes(self) -> int:
        return self._verdicts.total()

    @property
    def summary(self) -> str:
        lines = [f"{self.num_votes} {'vote' if self.num_votes == 1 else 'votes'} in {self.out}"]
        if self._num_pairs_left_out:
            lines.append(pairs_left_out(self._num_pairs_left_out))
        return "\n".join(lines)

    def has_voted(self, rater: str, prompt: str) -> bool:
        """Whether a rater has voted on an answer to the prompt with this id."""
        return self._verdicts[hash_name(rater), prompt] > 0

    def flush(self) -> None:
        """Write the rows of all votes. Raises UserError when the files cannot be written."""
        with self._writing:
            with self._lock:
                votes, pending = list(self._votes.values()), self._store.num_pending
            imported = make_rows(votes, unlabelled=self._store.has_unlabelled)
            self._store.write(votes, imported, self._main, pending=pending)
            self._num_pairs_left_out = imported.num_pairs_left_out

    def close(self) -> None:
        """Write the rows, and release the files. Calling it again has no effect.

        Raises UserError when the rows cannot be written; the votes are on the disk nevertheless.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._changed.set()
        self._thread.join()
        try:
            if self._store.num_pending:
                self.flush()
        finally:
            self._files.close()

    def _write_rows(self) -> None:
        """Write the rows some time after votes have changed, until the store is closed."""
        pause = self._pause
        while not self._closing.is_set():
            self._changed.wait()
            if self._closing.wait(pause):
                return
            self._changed.clear()
            start = time.monotonic()
            try:
                self.flush()
            except UserError as error:
                self._changed.set()
                self._on_error(error)
            pause = max(self._pause, IDLE_RATIO * (time.monotonic() - start))

    # Answers

    def add(self, answer: Answer) -> None:
        """Store an answer, for feedback on it at any later time, also after a restart."""
        self._answers.add(answer)

    def answer(self, id: str) -> Answer:
        """Return an answer. Raises KeyError when there is none with this id."""
        return self._answers.get(id)

    # Votes

    def rate(
        self,
        answer: Answer,
        rater: str,
        *,
        label: bool | None = None,
        score: float | None = None,
        correction: str | None = None,
        correction_ids: Sequence[int] = (),
        comment: str = "",
        tags: Sequence[str] = (),
    ) -> None:
        """Record a rater's verdict on an answer, in place of an earlier one.

        Without a verdict, the earlier one is withdrawn. correction_ids: the tokens of the
        correction behind the same prompt, if they are known.
        """
        tokens = _tokens(answer) if _has_tokens_of_text(answer) else {}
        if tokens and correction and correction_ids:
            tokens["correction_ids"] = list(correction_ids)
        self._record(
            answer,
            rater,
            answer.id,
            label=label,
            score=score,
            correction=correction or None,
            comment=comment,
            tags=tuple(tags),
            tokens=tokens,
            info=answer.info,
        )

    def compare(
        self, a: Answer, b: Answer, winner: Winner | None, rater: str, *, comment: str = ""
    ) -> None:
        """Record which of two answers is better; a was shown first. None withdraws the vote."""
        # a row has the tokens of a single prompt
        *other_turns, other = b.messages
        has_tokens = a.vocabulary == b.vocabulary and a.prompt_ids == b.prompt_ids
        has_tokens &= _has_tokens_of_text(a) and _has_tokens_of_text(b)
        self._record(
            a,
            rater,
            f"{a.id}/{b.id}",
            other=other,
            other_turns=tuple(other_turns),
            other_message=b.id,
            other_model=b.model,
            winner=None if winner is None else WINNERS[winner],
            comment=comment,
            info={} if a.model == b.model else {"sides": [a.model, b.model]},
            tokens=_tokens(a) if has_tokens else {},
            other_tokens=_tokens(b) if has_tokens else {},
        )

    def winner(self, a: Answer, b: Answer, rater: str) -> Winner | None:
        """A rater's verdict on two answers; None if there is none."""
        vote = self._comparisons.get(f"{a.id}/{b.id}/{hash_name(rater)}")
        winner = None if vote is None else vote.winner
        return next((name for name, result in WINNERS.items() if result == winner), None)

    def results(self, models: tuple[str, str]) -> ComparisonResults:
        """The verdicts on all comparisons of an answer of one model with one of the other."""
        results = ComparisonResults(dict.fromkeys(models, 0))
        with self._lock:
            votes = list(self._comparisons.values())
        for vote in votes:
            if {vote.model, vote.other_model} != set(models):
                continue
            if vote.winner in ("this", "other"):
                results.wins[vote.model if vote.winner == "this" else vote.other_model] += 1
            elif vote.winner == "tie":
                results.ties += 1
            elif vote.winner == "both_bad":
                results.both_bad += 1
        return results

    def _record(self, answer: Answer, rater: str, target: str, **verdict: Any) -> None:
        name = hash_name(rater)
        *turns, completion = answer.messages
        with self._lock:
            # later than all others, also after the clock was set back
            now = max(time.time(), self._newest + 1e-6)
            vote = Vote(
                source=SOURCE,
                id=f"{target}/{name}",
                updated_at=now,
                rater=name,
                prompt=answer.prompt,
                tools=answer.tools,
                completion=completion,
                turns=tuple(turns),
                message=answer.id,
                parent=answer.key,
                model=answer.model,
                origin=self._answers.origin(answer.id),
                **verdict,
            )
            self._store.append(vote)
            self._count(vote)
            self._changed.set()

    def _count(self, vote: Vote) -> None:
        """Count a stored vote instead of an earlier one with the same key."""
        if (earlier := self._votes.get(vote.key)) is not None:
            self._verdicts[earlier.rater, earlier.parent] -= earlier.has_verdict
        self._votes[vote.key] = vote
        if vote.source == SOURCE and vote.other is not None:
            self._comparisons[vote.id] = vote
        self._verdicts[vote.rater, vote.parent] += vote.has_verdict
        self._newest = max(self._newest, vote.updated_at)


@lru_cache(4096)
def hash_name(rater: str) -> HashedRater:
    """The hash that is stored instead of a rater's name."""
    return HashedRater(hash_rater(SOURCE, rater) or "local")


def _has_tokens_of_text(answer: Answer) -> bool:
    """Whether the tokens of an answer are those of its text, which was rated. The text of an answer
    that reached a stop string ends before it, often within a token.
    """
    return answer.completion.stop != "stop"


def _tokens(answer: Answer) -> dict[str, Any]:
    """The tokens of an answer, in the columns of sampled completions."""
    mask = answer.completion.mask
    return {
        "prompt_ids": list(answer.prompt_ids),
        "completion_ids": list(answer.completion.tokens),
        "logps": list(answer.completion.logps),
        "temperature": answer.sampling.temperature,
        "top_p": answer.sampling.top_p,
        "vocabulary": answer.vocabulary,
        **({} if all(mask) else {"mask": list(map(int, mask))}),
    }


def _answer_line(answer: Answer) -> dict[str, Any]:
    completion = answer.completion
    return {
        "id": answer.id,
        "model": answer.model,
        "key": answer.key,
        "prompt": [dict(message) for message in answer.prompt],
        "tools": [dict(tool) for tool in answer.tools],
        "completion": completion.text,
        **({"turns": [dict(turn) for turn in answer.turns]} if answer.turns else {}),
        "stop": completion.stop,
        "version": completion.version,
        **_tokens(answer),
        **({"info": dict(answer.info)} if answer.info else {}),
        "time": time.time(),
    }


def _read_answer(line: Mapping[str, Any]) -> Answer:
    """Read an answer from a line. Raises KeyError if a field is missing."""
    prompt: tuple[Message, ...] = tuple(line["prompt"])
    return Answer(
        id=line["id"],
        model=line["model"],
        key=line.get("key") or prompt_id(prompt, line["tools"]),
        vocabulary=line["vocabulary"],
        prompt=prompt,
        tools=tuple(line["tools"]),
        prompt_ids=tuple(line["prompt_ids"]),
        completion=Completion(
            prompt_id="",
            tokens=tuple(line["completion_ids"]),
            logps=tuple(line["logps"]),
            text=line["completion"],
            stop=line["stop"],
            version=line["version"],
            mask=tuple(map(bool, line.get("mask", ()))),
        ),
        sampling=Sampling(temperature=line["temperature"], top_p=line["top_p"]),
        turns=tuple(line.get("turns", ())),
        info=line.get("info", {}),
    )
