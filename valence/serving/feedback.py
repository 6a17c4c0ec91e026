"""Keep the answers of a service and the votes on them, in files like those of an import."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from valence.data.encode import Encoder
from valence.data.importers.records import HashedRater, Vote, hash_rater
from valence.data.importers.rows import make_rows
from valence.errors import UserError
from valence.jobs.import_store import ImportStore, merge_votes
from valence.jobs.lines import as_line
from valence.rollouts import Sampling
from valence.serving.chat import Answer
from valence.serving.prompts import prompt_id
from valence.types import (
    Chat,
    Completion,
    Demonstration,
    Origin,
    TokenizedExample,
)

SOURCE = "valence"
"""The name of this service among the sources of votes."""

RECENT = 1000
"""Answers that are kept in memory; older ones are read from the file."""

Winner = Literal["a", "b", "tie", "both_bad"]


class FeedbackStore:
    """Answers and votes on disk.

    Everything that a method returns from is on the disk. Answers go to ``NAME.answers.jsonl``;
    votes and rows to the files of an import. num_votes: votes in the files.
    """

    def __init__(self, out: Path, encoder: Encoder) -> None:
        """Raises UserError when the files belong to something else, or another process writes
        them.
        """
        self.out, self._encoder = out, encoder
        self._files = ExitStack()
        self._lock = threading.Lock()
        self._store = self._files.enter_context(ImportStore(out).locked())
        self._set_votes(self._store.votes)
        self._recent: OrderedDict[str, Answer] = OrderedDict()
        self._path = out.with_name(f"{out.stem}.answers.jsonl")
        try:
            self._file = self._files.enter_context(self._path.open("a+b"))
        except OSError as error:
            self._files.close()
            raise UserError(
                f"the file cannot be written ({error.strerror})",
                code="file-not-writable",
                where=str(self._path),
                fix="name another file with --out",
            ) from error
        self._places = self._read_places()

    @property
    def num_votes(self) -> int:
        return sum(_has_verdict(vote) for vote in self._votes)

    def has_voted(self, rater: str, prompt: str) -> bool:
        """Whether a rater has voted on an answer to the prompt with this id."""
        return (self._rater(rater), prompt) in self._voted

    def close(self) -> None:
        self._files.close()

    # Answers

    def _read_places(self) -> dict[str, int]:
        """Where the line of each answer begins. A line that a crash has cut off is removed."""
        places: dict[str, int] = {}
        self._file.seek(0)
        start = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(start)
                break
            try:
                places[str(json.loads(line)["id"])] = start
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"this line is not an answer ({error})",
                    code="output-line-foreign",
                    where=f"{self._path}: byte {start}",
                    fix="name another file with --out",
                ) from error
            start += len(line)
        self._file.seek(0, os.SEEK_END)
        return places

    def add(self, answer: Answer) -> None:
        """Keep an answer, so that feedback on it can be given later, also after a restart."""
        completion, sampling = answer.completion, answer.sampling
        line = {
            "id": answer.id,
            "model": answer.model,
            "prompt": [dict(message) for message in answer.prompt],
            "prompt_ids": list(answer.prompt_ids),
            "completion": completion.text,
            "completion_ids": list(completion.tokens),
            "logps": [float(f"{logp:.9g}") for logp in completion.logps],
            "stop": completion.stop,
            "version": completion.version,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "time": time.time(),
        }
        data = f"{as_line(line)}\n".encode()
        with self._lock:
            self._places[answer.id] = self._file.tell()
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._recent[answer.id] = answer
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)

    def answer(self, id: str) -> Answer:
        """Return an answer. Raises KeyError when there is none with this id."""
        with self._lock:
            if id in self._recent:
                return self._recent[id]
            place = self._places[id]
            self._file.seek(place)
            line = json.loads(self._file.readline())
            self._file.seek(0, os.SEEK_END)
        return Answer(
            id=id,
            model=line["model"],
            prompt=tuple(line["prompt"]),
            prompt_ids=tuple(line["prompt_ids"]),
            completion=Completion(
                prompt_id="",
                tokens=tuple(line["completion_ids"]),
                logps=tuple(line["logps"]),
                text=line["completion"],
                stop=line["stop"],
                version=line["version"],
            ),
            sampling=Sampling(temperature=line["temperature"], top_p=line["top_p"]),
        )

    # Votes

    def rate(
        self,
        answer: Answer,
        rater: str,
        *,
        label: bool | None = None,
        score: float | None = None,
        correction: str | None = None,
        comment: str = "",
        tags: Sequence[str] = (),
    ) -> None:
        """Record a rater's verdict on an answer, in place of an earlier one.

        Without a verdict, the earlier one is withdrawn.
        """
        tokens = self._tokens(answer)
        if correction:
            tokens["correction_ids"] = self._correction_ids(answer, correction)
        self._record(
            Vote(
                **self._common(answer, rater, answer.id),
                completion=answer.message,
                message=answer.id,
                label=label,
                score=score,
                correction=correction or None,
                comment=comment,
                tags=tuple(tags),
                tokens=tokens,
            )
        )

    def compare(
        self, a: Answer, b: Answer, winner: Winner | None, rater: str, *, comment: str = ""
    ) -> None:
        """Record which of two answers is better. None withdraws it."""
        names: dict[Winner, Any] = {"a": "this", "b": "other", "tie": "tie", "both_bad": "both_bad"}
        self._record(
            Vote(
                **self._common(a, rater, f"{a.id}/{b.id}"),
                completion=a.message,
                message=a.id,
                other=b.message,
                other_message=b.id,
                other_model=b.model,
                winner=None if winner is None else names[winner],
                comment=comment,
                tokens=self._tokens(a),
                other_tokens=self._tokens(b),
            )
        )

    def _common(self, answer: Answer, rater: str, target: str) -> dict[str, Any]:
        rater = self._rater(rater)
        return {
            "source": SOURCE,
            "id": f"{target}/{rater}",
            "updated_at": time.time(),
            "rater": rater,
            "prompt": answer.prompt,
            "parent": prompt_id(answer.prompt),
            "model": answer.model,
            "origin": Origin(self._path.name, list(self._places).index(answer.id) + 1),
        }

    def _tokens(self, answer: Answer) -> dict[str, Any]:
        """The tokens of an answer, as rows of sampled completions have them."""
        return {
            "prompt_ids": list(answer.prompt_ids),
            "completion_ids": list(answer.completion.tokens),
            "logps": list(answer.completion.logps),
            "temperature": answer.sampling.temperature,
            "top_p": answer.sampling.top_p,
            "vocabulary": self._encoder.vocab.digest,
        }

    def _correction_ids(self, answer: Answer, correction: str) -> list[int]:
        """The tokens of a correction behind the same prompt."""
        encoded = self._encoder.encode(
            Demonstration(
                prompt=Chat(answer.prompt),
                completion=Chat(({"role": "assistant", "content": correction},)),
                origin=Origin(self._path.name, 0),
            )
        )
        if not isinstance(encoded, TokenizedExample):
            raise UserError(
                f"the correction cannot be used: {encoded.reason}",
                code=encoded.code,
                where="correction",
                fix=encoded.fix,
            )
        return list(encoded.answers[0].ids)

    def _record(self, vote: Vote) -> None:
        with self._lock:
            votes, _ = merge_votes(self._votes, [vote])
            self._store.write(votes, make_rows(votes), "thumbs")
            self._set_votes(votes)

    def _set_votes(self, votes: Sequence[Vote]) -> None:
        self._votes = list(votes)
        self._voted = {(vote.rater, vote.parent) for vote in votes if _has_verdict(vote)}

    @staticmethod
    def _rater(rater: str) -> str:
        """What is written instead of a rater's name."""
        return HashedRater(hash_rater(SOURCE, rater) or "local")


def _has_verdict(vote: Vote) -> bool:
    verdicts: Sequence[Any] = (vote.label, vote.score, vote.winner, vote.correction)
    return any(verdict is not None for verdict in verdicts)
