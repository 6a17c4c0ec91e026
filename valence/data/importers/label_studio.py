"""Label Studio: annotations exported as JSON, JSON_MIN, CSV or TSV.

An export lacks the labelling configuration, so the columns of the prompt and of the completions are
guessed by their names, unless ``ReadOptions.paths`` names them. Predictions are never read as
votes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from valence.data.importers.exports import Columns, export_rows, guess_parts, votes_or_skipped
from valence.data.importers.fields import (
    decode_json,
    object_at,
    objects_at,
    text_list,
    timestamp,
    value_at,
    word_label,
)
from valence.data.importers.messages import assistant, prompt_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote, Winner
from valence.data.sources import Row
from valence.data.values import as_number

SOURCE = "label_studio"
CONTROLS = frozenset(
    {
        "label",
        "choice",
        "choices",
        "comment",
        "feedback",
        "preference",
        "quality",
        "rating",
        "thumb",
        "thumbs",
        "tie",
        "verdict",
    }
)
"""Columns of JSON_MIN and CSV whose text is an annotation, besides those that the user names."""
TIES = frozenset({"tie", "equal", "same", "both good", "draw", "no preference"})
BOTH_BAD = frozenset({"both bad", "both are bad", "neither", "none"})


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """One vote for each annotation."""
    for row in export_rows(paths, "Label Studio", lambda row: _is_task(row) or _is_flat(row)):
        if isinstance(row, Skipped):
            yield row
        elif _is_task(row.value):
            yield from _task(row, options)
        else:
            yield from votes_or_skipped(_flat(row, options), row.origin)


def _is_task(row: Columns) -> bool:
    return isinstance(row.get("data"), Mapping) and ("annotations" in row or "completions" in row)


def _is_flat(row: Columns) -> bool:
    return "annotation_id" in row and "annotator" in row


@dataclass
class _Answers:
    """What an annotation says. choices: by control."""

    selected: str | None = None
    choices: dict[str, str] = field(default_factory=dict[str, str])
    rating: float | None = None
    texts: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, control: str, value: Mapping[str, Any]) -> None:
        """Add the value of one result."""
        if isinstance(value.get("selected"), str):
            self.selected = value["selected"]
        if "rating" in value:
            self.rating = as_number(value["rating"])
        if choices := text_list(value.get("choices")):
            self.choices[control] = choices[0]
        if texts := text_list(value.get("text")):
            self.texts[control] = "\n".join(texts)

    def comments(self, correction: str | None) -> list[str]:
        """The texts that are neither the correction nor, in a flat export, a choice."""
        return [
            text
            for control, text in self.texts.items()
            if control != correction and (control == "comment" or control not in self.choices)
        ]


def _task(row: Row, options: ReadOptions) -> Iterator[Vote | Skipped]:
    for _ in objects_at(row.value, "predictions"):
        yield Skipped("machine", row.origin, "prediction")
    annotations = objects_at(row.value, "annotations") or objects_at(row.value, "completions")
    if not annotations:
        yield Skipped("no_vote", row.origin)
    for annotation in annotations:
        yield from votes_or_skipped(_annotation(row, annotation, options), row.origin)


def _annotation(row: Row, annotation: Columns, options: ReadOptions) -> Iterator[Vote]:
    if annotation.get("was_cancelled") or annotation.get("skipped"):
        raise UnusableVote("cancelled")
    answers = _Answers()
    for result in objects_at(annotation, "result"):
        answers.add(str(result.get("from_name")), object_at(result, "value"))
    rater = annotation.get("completed_by")
    if isinstance(rater, Mapping):
        rater = rater.get("id") or rater.get("email")
    fields = {
        "id": str(annotation.get("id") or ""),
        "rater": "" if rater is None else str(rater),
        "updated_at": timestamp(annotation.get("updated_at") or annotation.get("created_at")),
    }
    yield _vote(row, object_at(row.value, "data"), answers, fields, options)


def _flat(row: Row, options: ReadOptions) -> Iterator[Vote]:
    """The vote of a row of JSON_MIN or CSV, in which data and controls are columns alike."""
    data = {name: decode_json(cell) for name, cell in row.value.items()}
    # a column of the data is renamed where a control has the same name
    data |= {name.removeprefix("_data_"): data[name] for name in data if name.startswith("_data_")}
    answers = _Answers()
    parts = _parts(data, options).values()
    controls = CONTROLS | {options.paths.get("label"), options.paths.get("correction")}
    for name, cell in row.value.items():
        if name.startswith("_data_") or (name in parts and f"_data_{name}" not in data):
            continue
        value = decode_json(cell)
        if isinstance(value, str) and name in controls:
            answers.choices[name] = answers.texts[name] = value
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Mapping):
                answers.add(name, entry)
    rater = row.value.get("annotator")
    fields = {
        "id": str(row.value.get("annotation_id") or ""),
        "rater": "" if rater is None else str(rater),
        "updated_at": timestamp(row.value.get("updated_at") or row.value.get("created_at")),
    }
    yield _vote(row, data, answers, fields, options)


def _parts(data: Columns, options: ReadOptions) -> dict[str, str]:
    """The columns of the parts of a task, within its data."""
    paths = {part: path.removeprefix("data.") for part, path in options.paths.items()}
    return guess_parts(data, paths)


def _vote(
    row: Row, data: Columns, answers: _Answers, fields: Mapping[str, Any], options: ReadOptions
) -> Vote:
    parts = _parts(data, options)
    if "prompt" not in parts:
        raise UnusableVote("no_prompt", f"columns {', '.join(list(data)[:8])}")
    task = str(row.value.get("id") or "")
    is_pair = "left" in parts and "right" in parts
    winner = _winner(answers, parts) if is_pair else None
    label, score = (None, None) if is_pair else _label(answers, options)
    control = options.paths.get("correction")
    correction = answers.texts.get(control or "")
    if winner is None and label is None and score is None and correction is None:
        raise UnusableVote("no_vote", answers.selected or next(iter(answers.choices.values()), ""))
    column = parts.get("left" if is_pair else "completion")
    if column is None:
        raise UnusableVote("shape_unknown", f"columns {', '.join(list(data)[:8])}")
    keeps = options.keeps_reasoning
    other: dict[str, Any] = {}
    if is_pair:
        other = {
            "other": assistant(value_at(data, parts["right"]), keeps_reasoning=keeps),
            "other_message": f"{task}/{parts['right']}",
            "winner": winner,
        }
    return Vote(
        source=SOURCE,
        **fields,
        prompt=prompt_of(value_at(data, parts["prompt"])),
        completion=assistant(value_at(data, column), keeps_reasoning=keeps),
        message=f"{task}/{column}",
        label=label,
        score=score,
        correction=correction,
        comment="\n".join(answers.comments(control)),
        origin=row.origin,
        **other,
    )


def _winner(answers: _Answers, parts: Mapping[str, str]) -> Winner | None:
    """The result of a comparison, where the left one is ``this``."""
    lefts, rights = {"left", parts["left"].casefold()}, {"right", parts["right"].casefold()}
    for choice in (answers.selected, *answers.choices.values()):
        word = "" if choice is None else choice.strip().casefold()
        if word in lefts:
            return "this"
        if word in rights:
            return "other"
        if word in TIES:
            return "tie"
        if word in BOTH_BAD:
            return "both_bad"
    return None


def _label(answers: _Answers, options: ReadOptions) -> tuple[bool | None, float | None]:
    """Thumbs of the first choice that is one, and the rating."""
    control = options.paths.get("label")
    for name, choice in answers.choices.items():
        label = word_label(choice, options.labels)
        if label is not None and control in (None, name):
            return label, answers.rating
    return None, answers.rating
