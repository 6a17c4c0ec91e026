"""Amazon Bedrock: rows of DPO with candidates, and results of human evaluation jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import object_at, objects_at, timestamp
from valence.data.importers.messages import assistant, prompt_of, system_turn, turns_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote, Winner
from valence.data.sources import Row
from valence.data.values import as_number
from valence.errors import UserError
from valence.types import content_id

SOURCE = "bedrock"
LIKERT = (1.0, 5.0)


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of DPO rows and of evaluation jobs.

    Where an evaluation job has several metrics, ``options.score_names`` says which are feedback.
    """
    for row in export_rows(paths, "Bedrock", _is_row):
        if isinstance(row, Skipped):
            yield row
        elif "humanEvaluationResult" in row.value:
            yield from votes_or_skipped(_evaluation_votes(row, options), row.origin)
        else:
            yield from votes_or_skipped(_candidate_votes(row, options), row.origin)


def _is_row(row: Columns) -> bool:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return "humanEvaluationResult" in row
    is_last_rated = isinstance(messages[-1], Mapping) and "candidates" in messages[-1]
    return "schemaVersion" in row or is_last_rated


def _candidate_votes(row: Row, options: ReadOptions) -> Iterator[Vote]:
    keeps = options.keeps_reasoning
    *earlier, last = row.value["messages"]
    if not isinstance(last, Mapping):
        raise UnusableVote("shape_unknown", f"turn is {last!r}")
    candidates = objects_at(last, "candidates")
    if not candidates:
        raise UnusableVote("no_vote", "without candidates")
    if last.get("role") != "assistant":
        raise UnusableVote("not_assistant", last.get("role"))
    prompt = (*system_turn(row.value.get("system")), *turns_of(earlier))
    by_label: dict[str, list[Any]] = {"preferred": [], "non-preferred": []}
    for candidate in candidates:
        by_label.setdefault(str(candidate.get("preferenceLabel")), []).append(candidate)
    if not by_label["preferred"] or not by_label["non-preferred"]:
        raise UnusableVote("no_vote", f"labels {', '.join(sorted(by_label))}")
    for better in by_label["preferred"]:
        for worse in by_label["non-preferred"]:
            yield Vote(
                source=SOURCE,
                id=content_id(row.value),
                prompt=prompt,
                completion=assistant(better.get("content"), keeps_reasoning=keeps),
                other=assistant(worse.get("content"), keeps_reasoning=keeps),
                winner="this",
                origin=row.origin,
            )


# Human evaluation jobs


def _evaluation_votes(row: Row, options: ReadOptions) -> Iterator[Vote | Skipped]:
    result = object_at(row.value, "humanEvaluationResult")
    record = object_at(row.value, "inputRecord")
    responses = objects_at(row.value, "modelResponses")
    loop = str(result.get("humanLoopName") or content_id(row.value))
    prompt = record.get("prompt")
    prompt = prompt.get("text") if isinstance(prompt, Mapping) else prompt
    turns = prompt_of(prompt)
    answers = objects_at(result, "humanAnswers")
    if not answers:
        raise UnusableVote("no_vote", "no worker answered")
    for answer in answers:
        results = object_at(object_at(answer, "answerContent"), "evaluationResults")
        worker = str(answer.get("workerId") or "")
        common = {
            "source": SOURCE,
            "id": content_id(loop, worker),
            "rater": worker,
            "updated_at": timestamp(answer.get("submissionTime")),
            "prompt": turns,
            "session": loop,
            "origin": row.origin,
        }
        rated = _feedback_entries(results, ("thumbsUpDown", "individualLikertScale"), row, options)
        compared = _feedback_entries(results, ("comparisonChoice", "comparisonRank"), row, options)
        for entry in rated:
            votes = _rating_votes(entry, responses, common, options)
            yield from votes_or_skipped(votes, row.origin)
        for entry in compared:
            votes = _comparison_votes(entry, responses, common, options)
            yield from votes_or_skipped(votes, row.origin)
        if not rated and not compared:
            yield Skipped("no_vote", row.origin, ", ".join(results))


def _feedback_entries(
    results: Mapping[str, Any], methods: tuple[str, ...], row: Row, options: ReadOptions
) -> list[Mapping[str, Any]]:
    """The results of the metrics that are feedback."""
    entries = [entry for method in methods for entry in objects_at(results, method)]
    names = sorted({str(entry.get("metricName")) for entry in entries})
    if options.score_names:
        return [entry for entry in entries if entry.get("metricName") in options.score_names]
    if len(names) > 1:
        raise UserError(
            f"the evaluation has several metrics: {', '.join(names)}",
            code="import-score-name-missing",
            where=str(row.origin),
            fix="choose the one that is feedback with --score-name",
        )
    return entries


def _rating_votes(
    entry: Mapping[str, Any],
    responses: list[Any],
    common: Mapping[str, Any],
    options: ReadOptions,
) -> Iterator[Vote]:
    """Thumbs, or a number of a Likert scale."""
    value = entry.get("result")
    label = value if isinstance(value, bool) else None
    score = as_number(value)
    if label is None and score is None:
        raise UnusableVote("no_vote", value)
    index, response = _response(entry.get("modelResponseId"), responses)
    yield Vote(
        **common,
        completion=assistant(response.get("response"), keeps_reasoning=options.keeps_reasoning),
        message=index,
        label=label,
        score=score,
        scale=None if score is None else LIKERT,
        model=str(response.get("modelIdentifier") or ""),
    )


def _comparison_votes(
    entry: Mapping[str, Any],
    responses: list[Any],
    common: Mapping[str, Any],
    options: ReadOptions,
) -> Iterator[Vote]:
    """The comparison of two responses: the id of the better one, or ranks by id."""
    result = entry.get("result")
    if len(responses) != 2:
        raise UnusableVote("shape_unknown", f"{len(responses)} responses compared")
    if isinstance(result, list):
        entries = objects_at(entry, "result")
        ranks = {str(e.get("modelResponseId")): as_number(e.get("rank")) for e in entries}
    else:
        best = result.get("modelResponseId") if isinstance(result, Mapping) else result
        ranks = {str(number): 2.0 for number in range(2)} | {str(best): 1.0}
    first, second = ranks.get("0"), ranks.get("1")
    if first is None or second is None or len(ranks) != 2:
        raise UnusableVote("shape_unknown", f"comparison {result}")
    winner: Winner = "tie" if first == second else "this" if first < second else "other"
    keeps = options.keeps_reasoning
    (index, response), (other_index, other) = (_response(str(n), responses) for n in range(2))
    yield Vote(
        **common,
        completion=assistant(response.get("response"), keeps_reasoning=keeps),
        message=index,
        other=assistant(other.get("response"), keeps_reasoning=keeps),
        other_message=other_index,
        other_model=str(other.get("modelIdentifier") or ""),
        winner=winner,
        model=str(response.get("modelIdentifier") or ""),
    )


def _response(index: object, responses: list[Any]) -> tuple[str, Mapping[str, Any]]:
    """A response by its id, which is its position from 0."""
    position = as_number(index)
    if position is None or not 0 <= position < len(responses):
        raise UnusableVote("message_missing", f"response {index} of {len(responses)}")
    return str(int(position)), responses[int(position)]
