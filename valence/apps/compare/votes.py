"""People as judges: the votes of ``valence collect A B`` as verdicts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from valence.data.importers.records import Vote
from valence.data.importers.rows import latest_votes
from valence.errors import UserError
from valence.evaluation.judges import AnswerPair, PairVerdict
from valence.storage import verify
from valence.types import Completion

PREFERENCES = {"this": 1.0, "other": 0.0, "tie": 0.5, "both_bad": 0.5}
"""The preference for the answer that a vote calls ``this``."""
SUFFIX = ".votes"


def votes_path(path: Path) -> Path:
    """The file of votes next to a file of rows, or the path itself if it is one of votes."""
    if path.stem.endswith(SUFFIX):
        return path
    return path.with_name(f"{path.stem}{SUFFIX}{path.suffix}")


def read_votes(
    path: Path, baseline: str, candidate: str
) -> tuple[list[AnswerPair], list[PairVerdict]]:
    """One pair and verdict for each prompt: the mean of all votes on the answers of both models.

    Two bad answers are a tie. The pair has the answers of the prompt's first vote. baseline,
    candidate: as they are named for ``valence collect``. Raises UserError if there are no votes.
    """
    by_prompt: dict[str, list[tuple[AnswerPair, float]]] = defaultdict(list)
    models: set[str] = set()
    for vote in _comparisons(votes_path(path)):
        models |= {vote.model, vote.other_model}
        sides = [_is_model(vote.model, name) for name in (candidate, baseline)]
        others = [_is_model(vote.other_model, name) for name in (baseline, candidate)]
        preference = PREFERENCES[str(vote.winner)]
        if sides[0] and others[0]:
            by_prompt[vote.parent].append((_pair(vote, path, is_candidate=True), preference))
        elif sides[1] and others[1]:
            by_prompt[vote.parent].append((_pair(vote, path, is_candidate=False), 1 - preference))
    if not by_prompt:
        compared = f": it compares {', '.join(sorted(models))}" if models else ""
        raise UserError(
            f"the file has no votes on answers of {baseline} and {candidate}{compared}",
            code="votes-missing",
            where=str(votes_path(path)),
            fix="pass the two models that you passed to `valence collect`",
        )
    pairs = [votes[0][0] for votes in by_prompt.values()]
    means = [sum(p for _, p in votes) / len(votes) for votes in by_prompt.values()]
    return pairs, [PairVerdict(value, 2 * value - 1) for value in means]


def _comparisons(path: Path) -> list[Vote]:
    """The votes of a file that compare answers of two models, with those that a server has
    received and not yet written to the file, because it is running or was killed.
    """
    pending = path.with_name(f"{path.stem.removesuffix(SUFFIX)}.pending{path.suffix}")
    # first, because the server moves votes from there to the file
    received = [*_read_votes(pending, is_growing=True)] if pending.exists() else []
    votes = [*(_read_votes(path) if path.exists() or not received else ()), *received]
    return [
        vote
        for vote in latest_votes(votes)
        if vote.other is not None and vote.winner is not None and vote.model != vote.other_model
    ]


def _read_votes(path: Path, *, is_growing: bool = False) -> Iterator[Vote]:
    """The votes of a file. is_growing: its last line may be incomplete, and is then left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error})",
            code="file-not-readable",
            where=str(path),
            fix="pass the --out file of `valence collect MODEL MODEL`",
        ) from error
    if is_growing:
        content = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(content.splitlines(), 1):
        try:
            yield Vote.from_dict(verify(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"this line is not a vote ({error})",
                code="output-line-foreign",
                where=f"{path}:{number}",
                fix="pass the --out file of `valence collect MODEL MODEL`",
            ) from error


def _is_model(name: str, target: str) -> bool:
    return name in (target, Path(target).name)


def _pair(vote: Vote, path: Path, *, is_candidate: bool) -> AnswerPair:
    """The answers of a vote. is_candidate: its first answer is that of the candidate."""
    assert vote.other is not None
    texts = [str(message.get("content") or "") for message in (vote.completion, vote.other)]
    candidate, baseline = texts if is_candidate else texts[::-1]
    prompt = "\n".join(str(turn.get("content") or "") for turn in vote.prompt)
    sides = [Completion(vote.parent, (), (), text, "eos") for text in (baseline, candidate)]
    tags = tuple(str(tag) for tag in vote.tags)
    return AnswerPair(vote.target, prompt, sides[0], sides[1], tags, str(path))
