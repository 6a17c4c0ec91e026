"""Row -> Example: the readers of the formats in the table.

A format reads *parts* (prompt, completion, label, ...) from columns; the kind of its examples says
which parts are put together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from valence.data import values
from valence.data.format_table import FORMATS, begins_a_tree
from valence.data.values import Dialect, TextOrTurns
from valence.errors import UserError
from valence.types import (
    Chat,
    Content,
    Demonstration,
    Example,
    Judgement,
    Kind,
    Message,
    Origin,
    Preference,
    Prompt,
    Ranking,
    Sampled,
)

T = TypeVar("T")
D = TypeVar("D")
RATINGS = ("label", "score", "feedback")
"""Parts that a person fills in, and may leave out."""
LEFT_OUT = "row-left-out"
UNRATED = "row-unrated"
UNDECIDED = ("row-tied", "row-turns-differ", UNRATED, LEFT_OUT)
"""Codes of rows that are left out and no mistakes: comparisons that no pair can be made of, answers
with feedback and no label or the other way round, messages that do not begin a conversation, and
those that the function of a format leaves out.
"""
SIGNED = re.compile("minus|strength|diff|margin|overall_preference")
"""In names of columns with numbers that have a sign, also if those at hand are all above 0."""
TURNS_DIFFER = "its answers belong to different conversations"
TURNS_DIFFER_FIX = (
    "remove the turns after the first answer that differs, for example with a function as the "
    "format (see `valence docs extend`)"
)


@dataclass(frozen=True, slots=True)
class Columns:
    """One row, read by part. ``columns``: part of the format -> column of the file."""

    value: Mapping[str, Any]
    columns: Mapping[str, str]
    dialect: Dialect
    origin: Origin

    def name(self, part: str) -> str:
        return self.columns[part]

    def get(self, part: str) -> Any:
        """The part, or None when this format or this row does not have it."""
        return lookup(self.value, self.columns[part]) if part in self.columns else None

    def parse(self, part: str, parser: Callable[[object, str], T], default: D) -> T | D:
        value = self.get(part)
        return default if value is None else parser(value, self.name(part))

    def answers(self, parts: Sequence[str]) -> dict[str, TextOrTurns]:
        """Text or turns in these parts, by the name of their column."""
        cells = {self.name(part): self.get(part) for part in parts}
        return {name: values.text_or_turns(c, name, self.dialect) for name, c in cells.items()}

    @property
    def common(self) -> dict[str, Any]:
        """The fields that every Example has."""
        weight = self.parse("weight", values.weight, 1.0)
        return {"weight": weight, "info": self.info, "origin": self.origin}

    @property
    def info(self) -> Mapping[str, Any]:
        return self.parse("info", values.info, {})

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return self.parse("tools", values.tools, ())


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or of a dotted path into one (``input.messages``, ``choices.0.text``);
    None when there is none.
    """
    if path in row or "." not in path:
        return row.get(path)
    value: Any = row
    for name in path.split("."):
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


# Prompts and answers


def _read_contents(
    row: Columns, *parts: str, to_learn: bool = False
) -> tuple[Content, Sequence[Content]]:
    """The prompt, and the answers in these parts.

    to_learn: leave out turns of a conversation after the last one to learn from (whose weight is
    not 0).
    """
    if "prompt_text" in row.columns:
        return _read_ids(row, *parts)
    if "text" in row.columns:
        prompt, answers = _split_text(row)
    elif "messages" in row.columns:
        prompt, answers = _split_conversation(row, to_learn=to_learn)
        answers |= row.answers(parts[1:])
    elif "first" in row.columns and (conversations := _read_text_lists(row, *parts)):
        prompt, answers = _split_shared_prompt(row, conversations)
    elif row.get("prompt") is not None or "instruction" in row.columns:
        prompt, answers = _parse_prompt(row), row.answers(parts)
    elif len(parts) == 1:
        prompt, answers = "", row.answers(parts)
    else:
        conversations = {row.name(part): row.get(part) for part in parts}
        prompt, answers = _split_shared_prompt(row, conversations)
    return values.exchange(prompt, answers, row.tools)


def _split_text(row: Columns) -> tuple[str, dict[str, TextOrTurns]]:
    """A text without a prompt, or a transcript as its prompt and its last answer."""
    name, text = row.name("text"), values.text(row.get("text"), row.name("text"))
    _, answer = values.transcript(text)
    return text[:answer], {name: text[answer:]}


def _parse_prompt(row: Columns) -> TextOrTurns:
    """The prompt: text, or turns after the system prompt and earlier rounds. An instruction is
    always a turn, with its input on the next line.
    """
    part = "instruction" if "instruction" in row.columns else "prompt"
    name, prompt, rounds = row.name(part), row.get(part), _read_rounds(row)
    is_in_chat = isinstance(prompt, str) and prompt and (rounds or row.get("system"))
    if part == "instruction" or is_in_chat:
        texts = [values.text(prompt, name)]
        if more := row.get("input"):
            texts.append(values.text(more, row.name("input")))
        prompt = [*rounds, {"role": "user", "content": "\n".join(texts)}]
    return values.prompt(_with_system(row, prompt), name, row.dialect)


def _read_rounds(row: Columns) -> list[dict[str, Any]]:
    """The turns of earlier rounds, each an instruction with its answer."""
    rounds = row.get("history") or []
    if not isinstance(rounds, list) or not all(
        isinstance(r, list | tuple) and len(r) == 2 for r in rounds
    ):
        fix = 'write it as [["instruction", "answer"], ...]'
        raise values.wrong_type(rounds, row.name("history"), "a list of earlier rounds", fix)
    return [
        {"role": role, "content": content}
        for pair in rounds
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def _read_text_lists(row: Columns, *parts: str) -> dict[str, object]:
    """Two conversations by column, of a row with lists of what the user and both sides wrote; empty
    for other rows.
    """
    questions, *answers = (values.texts(row.get(part)) for part in ("prompt", *parts))
    if not questions or any(len(side) != len(questions) for side in answers):
        return {}
    return {
        row.name(part): values.as_turns([*chain(*zip(questions, side, strict=True))])
        for part, side in zip(parts, answers, strict=True)
    }


def _split_shared_prompt(
    row: Columns, sides: Mapping[str, Any]
) -> tuple[TextOrTurns, Mapping[str, TextOrTurns]]:
    """The prompt that both sides of a pair begin with, and the answers.

    sides: the conversations by column.
    """
    num_rounds = values.as_number(row.get("turn"))
    if num_rounds:  # the answers of this round are compared
        sides = {name: values.first_rounds(side, int(num_rounds)) for name, side in sides.items()}
    prompt, answers = values.split_shared_prompt(sides, row.dialect)
    if "first" in row.columns and any(len(side) - len(prompt) > 1 for side in sides.values()):
        raise UserError(TURNS_DIFFER, code="row-turns-differ", fix=TURNS_DIFFER_FIX)
    return prompt, answers


def _with_system(row: Columns, turns: Any) -> Any:
    """Unparsed chat turns after the text of the system column."""
    system = row.get("system")
    if values.dialect_of(turns):
        turns = [turns]
    if not system or not isinstance(turns, list):
        return turns
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    dialect = values.dialect_of(first) or row.dialect
    if dialect.roles.get(str(first.get(dialect.role))) == "system":
        if first.get(dialect.content) == system:
            return turns
        raise UserError(
            f"the row has a system turn, and also the column {row.name('system')}",
            code="row-system-twice",
            fix="remove one of the two",
        )
    return [{row.dialect.role: "system", row.dialect.content: system}, *turns]


def _split_conversation(
    row: Columns, *, to_learn: bool
) -> tuple[tuple[Message, ...], dict[str, TextOrTurns]]:
    """A conversation as its prompt and the assistant's last turn."""
    name, conversation = row.name("messages"), row.get("messages")
    if isinstance(conversation, list):
        conversation = values.as_turns(conversation)
    turns = values.turns(_with_system(row, conversation), name, row.dialect)
    if turns[-1]["role"] != "assistant":
        raise UserError(
            f"{name} ends with a {turns[-1]['role']} turn, so there is no answer to learn from",
            code="row-answer-missing",
            fix="remove the turns after the last assistant turn, or remove the row; to use only "
            f"the prompts, set keys: {{prompt: {name}}} on this file",
        )
    if to_learn:
        learned = (
            i
            for i, turn in enumerate(turns, 1)
            if turn["role"] == "assistant" and turn.get("weight") != 0
        )
        turns = turns[: max(learned, default=len(turns))]
    return values.check_prompt(turns[:-1], name), {name: turns[-1:]}


def _read_sampled(row: Columns, num_tokens: int) -> Sampled:
    settings = row.parse("sampled", values.mapping, {})
    name = row.name("sampled") if "sampled" in row.columns else ""
    logps = row.parse("logps", values.logps, ())
    if logps and len(logps) != num_tokens:
        raise UserError(
            f"{row.name('logps')} has {len(logps)} numbers, but the answer has {num_tokens} tokens",
            code="row-length-mismatch",
            fix="write one log-probability per token of the answer, including its end token",
        )
    temperature, top_p = (
        values.number(settings.get(key, 1.0), f"{key} of {name}")
        for key in ("temperature", "top_p")
    )
    vocabulary = settings.get("vocabulary")
    mask: Any = settings.get("mask") or ()
    if mask and (not isinstance(mask, list) or len(mask) != num_tokens):
        raise UserError(
            f"the mask of {name} is no list with one value for each of the {num_tokens} tokens",
            code="row-length-mismatch",
            fix="write 1 for each token that was sampled, and 0 for those of results of tools",
        )
    return Sampled(
        logps,
        temperature,
        top_p,
        vocabulary if isinstance(vocabulary, str) else "",
        is_truncated=row.get("stop") == "length",
        mask=tuple(map(bool, mask)),
    )


def _read_ids(row: Columns, *parts: str) -> tuple[Content, Sequence[Content]]:
    """The prompt and the answers as tokens, with their texts."""
    prompt, *completions = (
        values.ids(row.get(part), row.name(part)) for part in ("prompt", *parts)
    )
    sampled = _read_sampled(row, len(completions[0].ids))
    text, texts = _read_texts(row, parts)
    return replace(prompt, readable=text), [
        replace(completion, sampled=sampled, readable=text)
        for completion, text in zip(completions, texts, strict=True)
    ]


def _read_texts(
    row: Columns, parts: Sequence[str]
) -> tuple[Content | None, Sequence[Content | None]]:
    """The texts of the prompt and of these answers, next to their tokens. None: it cannot be read,
    or the answer was truncated, so that its text does not show that it has no end.
    """
    texts = {part: row.columns[f"{part}_text"] for part in ("prompt", *parts)}
    as_text = replace(row, columns={**row.columns, **texts})
    nothing = [None] * len(parts)
    try:
        prompt = _parse_prompt(as_text)
    except UserError:
        return None, nothing
    text = prompt if isinstance(prompt, str) else Chat(prompt, row.tools)
    if row.get("stop") == "length":
        return text, nothing
    try:
        return values.exchange(prompt, as_text.answers(parts), row.tools)
    except UserError:
        return text, nothing


# Readers


def _read_judgement(row: Columns) -> Judgement:
    prompt, (completion,) = _read_contents(row, "completion")
    scores = {
        part.removeprefix("scores."): row.parse(part, values.number, None)
        for part in row.columns
        if part.startswith("scores.")
    }
    return Judgement(
        prompt=prompt,
        completion=completion,
        label=row.parse("label", values.label, None),
        score=row.parse("score", values.number, None),
        attributes=row.parse("scores", values.attributes, {})
        or {name: score for name, score in scores.items() if score is not None},
        feedback=row.parse("feedback", values.text, "").strip(),
        error=str(row.get("error")) if has_failed(row.value, row.columns) else "",
        is_truncated=row.get("stop") == "length",
        **row.common,
    )


def has_failed(value: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row has an error instead of a score. columns: part of the format -> column."""
    score, error = columns.get("score", "score"), columns.get("error", "error")
    return score in value and value[score] is None and isinstance(value.get(error), str)


def _read_preference(row: Columns) -> Preference:
    """Two answers to a prompt, or two conversations that begin with it."""
    is_compared = "first" in row.columns
    sides = ("first", "second") if is_compared else ("chosen", "rejected")
    winner = _read_winner(row) if is_compared else 0
    prompt, answers = _read_contents(row, *sides)
    scores = [values.as_number(row.get(f"score_{side}")) for side in sides]
    better, worse = scores[winner], scores[1 - winner]
    if answers[0] == answers[1]:
        raise UserError(
            "the chosen and the rejected answer are the same",
            code="row-pair-identical",
            fix="remove the row, or correct one of the two answers",
        )
    return Preference(
        prompt=prompt,
        chosen=answers[winner],
        rejected=answers[1 - winner],
        margin=row.parse("margin", values.number, 0.0),
        soft=row.parse("soft", values.probability, None),
        is_contradicted=better is not None and worse is not None and better < worse,
        **row.common,
    )


def _read_winner(row: Columns) -> int:
    """0 if the first of two answers is the better one, and 1 if the second is.

    Raises UserError, also for a tie.
    """
    if "label" in row.columns:
        scores = [row.parse(f"score_{side}", values.number, None) for side in ("first", "second")]
        if None not in scores and scores[0] == scores[1]:
            raise UserError(
                f"{row.name('score_first')} and {row.name('score_second')} are equal, so neither "
                "output is preferred",
                code="row-pair-tied",
                fix="remove the row",
            )
        return 0 if values.label(row.get("label"), row.name("label")) else 1
    # below 0 for the first answer
    if "winner" in row.columns:
        names = (row.name("first"), row.name("second"))
        models = [row.value.get(f"model_{side}") for side in "ab"]
        difference = values.verdict(row.get("winner"), names, models)
        if difference is None:
            raise winner_error(row.columns, [row.get("winner")])
    else:
        first, second, tie, lead, strength = (
            row.parse(part, _number_or_flag, 0.0)
            for part in ("score_first", "score_second", "score_tie", "lead", "strength")
        )
        difference = second - first - lead + strength
        if tie > 0 and tie >= max(first, second):
            difference = 0
    if difference == 0:
        raise UserError(
            "neither of its answers is preferred", code="row-tied", fix="remove the row"
        )
    return int(difference > 0)


def _number_or_flag(value: object, name: str) -> float:
    return float(value) if isinstance(value, bool) else values.number(value, name)


def winner_error(columns: Mapping[str, str], cells: Sequence[object]) -> UserError:
    """The error for values that do not say which of two answers is better.

    columns: part of the format -> column of the file.
    """
    first, second, column = (columns[part] for part in ("first", "second", "winner"))
    settings = comparison_settings(columns, column, cells)
    return UserError(
        f"{column} is {values.shown(cells[0])}, which does not say whether {first} or {second} is "
        "better",
        code="row-winner-unknown",
        fix=(f"{settings}; or " if settings else "")
        + f"write {first}, {second} or tie into {column}",
    )


def comparison_settings(columns: Mapping[str, str], column: str, cells: Sequence[object]) -> str:
    """The settings for numbers with signs, or for 1 and 0, that say which of two answers is better;
    empty for other values.
    """
    numbers = [values.as_number(cell) for cell in cells]
    prompt = columns.get("prompt", columns.get("instruction"))
    is_signed = any(number is not None and number < 0 for number in numbers) or (
        SIGNED.search(column.casefold()) is not None and None not in numbers
    )
    are_thumbs = bool(cells) and all(values.thumb(cell) is not None for cell in cells)
    if prompt is None or not (is_signed or are_thumbs):
        return ""
    values_of_first, name = "1 is", "pairwise_feedback"
    if is_signed:
        values_of_first, name = "numbers below 0 are", "helpsteer2_preference"
    # the columns of both formats: the prompt, the two answers, and which one is better
    _, first, second, winner, *_ = FORMATS[name].parts
    answers = (columns["first"], columns["second"])
    ways = [
        f"if {values_of_first} for {better}, keys: {{{first}: {better}, {second}: {other}, "
        f"{winner}: {column}, prompt: {prompt}}}"
        for better, other in (answers, answers[::-1])
    ]
    return f"set on this file format: {name} and, {'; '.join(ways)}"


def _read_demonstration(row: Columns) -> Demonstration:
    prompt, (completion,) = _read_contents(row, "completion", to_learn=True)
    return Demonstration(prompt=prompt, completion=completion, **row.common)


def _read_ranking(row: Columns) -> Ranking:
    """k answers with k scores, or k ranks from 1 (the best): a rank r becomes the score -r."""
    items, name = row.get("completions"), row.name("completions")
    if not isinstance(items, list) or len(items) < 2:
        fix = "write all answers to the prompt as a list in one row"
        raise values.wrong_type(items, name, "a list of two or more answers", fix)
    graded = [values.graded(item) for item in items]
    answers = {
        f"answer {n} of {name}": values.text_or_turns(item.get("text"), name, row.dialect)
        for n, item in enumerate(graded, 1)
    }
    prompt, completions = values.exchange(_parse_prompt(row), answers, row.tools)
    return Ranking(
        prompt=prompt, completions=completions, scores=_read_scores(row, graded), **row.common
    )


def _read_scores(row: Columns, graded: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """The scores of answers, from their columns or from the answers themselves."""
    columns = {part: row.get(part) for part in ("scores", "ranks") if row.get(part) is not None}
    best = 1
    if not columns:
        best = 0  # some tools count ranks from 0
        for part in ("rank", "score"):  # scores are finer than ranks
            if all(part in item for item in graded):
                columns = {f"{part}s": [item[part] for item in graded]}
    if len(columns) != 1:
        scores, ranks = (row.columns.get(part, part) for part in ("scores", "ranks"))
        raise UserError(
            f"the row has {'both' if columns else 'no'} {scores} and {ranks}",
            code="row-scores-and-ranks" if columns else "row-scores-missing",
            fix="remove one of the two columns"
            if columns
            else f"add {scores}, a list with a number for each answer, or {ranks}, a list of ranks "
            "from 1 (the best)",
        )
    [(part, value)] = columns.items()
    name = row.columns.get(part, part)
    if not isinstance(value, list) or len(value) != len(graded):
        fix = "write one number per answer, in the order of the answers"
        raise values.wrong_type(value, name, f"a list of {len(graded)} numbers", fix)
    numbers = tuple(values.number(v, f"number {n} of {name}") for n, v in enumerate(value, 1))
    if part == "scores":
        return numbers
    if any(rank < best or rank != int(rank) for rank in numbers):
        fix = "rank the best answer 1, the second best 2, and so on"
        raise values.wrong_type(value, name, "whole numbers from 1", fix, "row-rank-invalid")
    return tuple(-rank for rank in numbers)


def _read_prompt(row: Columns) -> Prompt:
    """A prompt. All other columns, and the entries of ``info``, become its info.

    Raises UserError for a message of a tree that is not its first one.
    """
    if "role" in row.columns and not begins_a_tree({**row.value, "role": row.get("role")}):
        raise UserError("it does not begin a conversation", code=LEFT_OUT, fix="remove the row")
    prompt, _ = values.exchange(_parse_prompt(row), {}, row.tools)
    others = {name: value for name, value in row.value.items() if name not in row.columns.values()}
    return Prompt(prompt=prompt, **{**row.common, "info": {**row.info, **others}})


READERS: dict[Kind, Callable[[Columns], Example]] = {
    "judgement": _read_judgement,
    "preference": _read_preference,
    "demonstration": _read_demonstration,
    "ranking": _read_ranking,
    "prompt": _read_prompt,
}


# Reading a row


def columns_read(name: str, keys: Mapping[str, str]) -> dict[str, str]:
    """Part of the format -> column of the file. An optional part is left out if ``keys`` reads its
    column as another part.

    Raises UserError when ``keys`` names a column that the format does not have.
    """
    f = FORMATS[name]
    if unknown := [key for key in keys if key not in f.columns]:
        swapped = [f"{{{keys[key]}: {key}}}" for key in unknown if keys[key] in f.columns]
        raise UserError(
            f"keys: the format {name} has no column {' or '.join(map(repr, unknown))}",
            code="keys-unknown-column",
            fix=(f"did you mean {' and '.join(swapped)}? " if swapped else "")
            + "write keys as {column of the format: column of the file}; the format has the "
            + "columns "
            + ", ".join(f.columns),
        )
    return {
        part: keys.get(column, column)
        for column, part in f.columns.items()
        if column in f.required or column in keys or column not in keys.values()
    }


def _is_missing(row: Columns, part: str) -> bool:
    """Whether a row does not have a part, such as a rating of blanks alone."""
    if part == "score" and has_failed(row.value, row.columns):
        return False
    value = row.get(part)
    return value is None or (part in RATINGS and isinstance(value, str) and not value.strip())


def _check_columns(row: Columns, name: str) -> None:
    """Raise UserError if a row does not have all columns that its format needs."""
    f = FORMATS[name]
    missing = {
        column: part
        for column, part in f.parts.items()
        if column in f.required and _is_missing(row, part)
    }
    if not missing:
        return
    feedback = row.value.get("feedback")  # text for a method that reads no label
    has_feedback = isinstance(feedback, str) and bool(feedback.strip())
    if "feedback" in missing or ("label" in missing and has_feedback):
        part = "feedback" if "feedback" in missing else "label"
        raise UserError(f"the row has no {part}", code=UNRATED, fix=f"add {part}")
    columns = [row.name(part) for part in missing.values()]
    absent = [column for column, part in missing.items() if row.name(part) not in row.value]
    keys = ", ".join(f"{column}: COLUMN" for column in absent)
    pronoun = "it" if len(absent) == 1 else "them"
    renamed = f"; if the file has {pronoun} under another name, set keys: {{{keys}}} on this file"
    renamed = renamed if absent else ""
    if set(RATINGS).issuperset(missing.values()):
        raise UserError(
            f"the row has no rating: {' and '.join(columns)} is {'missing' if absent else 'empty'}",
            code="row-rating-missing",
            fix=f"rate the answer, or remove the row{renamed}",
        )
    raise UserError(
        f"the row has no {' and no '.join(columns)}, which the format {name} needs",
        code="row-column-missing",
        fix=f"add {' and '.join(columns)}, or put rows of another format into a separate file"
        f"{renamed}",
    )


def read_example(
    name: str, value: Mapping[str, Any], origin: Origin, keys: Mapping[str, str] | None = None
) -> Example:
    """The Example of a row of this format.

    Raises UserError, without the place, if the row is invalid.
    """
    f, columns = FORMATS[name], columns_read(name, keys or {})
    row = Columns(value, columns, f.dialect, origin)
    _check_columns(row, name)
    kind = value.get("type")
    if "type" in f.columns and kind is not None and kind != name:
        raise UserError(
            f"type of the row is {values.shown(kind)}, but this file is read as {name}",
            code="row-type-differs",
            fix="put rows of each type into a separate file",
        )
    return READERS[f.gives](row)
