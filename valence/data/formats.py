"""Row -> Example: the table of row formats, and the functions that read them.

A format reads *parts* (prompt, completion, label, ...) from columns. A new format is a line in
``FORMATS``, with a new function if none of these reads its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from valence.data import values
from valence.data.values import COLOSSAL, OPENAI, SHAREGPT, Dialect
from valence.errors import UserError
from valence.types import (
    Chat,
    Content,
    Demonstration,
    Example,
    Ids,
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

    @property
    def common(self) -> dict[str, Any]:
        """The fields that every Example has."""
        return {
            "weight": self.parse("weight", values.weight, 1.0),
            "info": self.info,
            "origin": self.origin,
        }

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
        if isinstance(value, Mapping):
            value = value.get(name)
        elif (
            isinstance(value, list)
            and name.isascii()
            and name.isdecimal()
            and int(name) < len(value)
        ):
            value = value[int(name)]
        else:
            return None
    return value


# Prompts and answers


def _read_exchange(row: Columns, *parts: str) -> tuple[Content, tuple[Content, ...]]:
    """The prompt, and the answers in these parts."""
    answers = {
        row.name(part): values.answer(row.get(part), row.name(part), row.dialect) for part in parts
    }
    return values.exchange(_parse_prompt(row), answers, row.tools)


def _parse_prompt(row: Columns) -> str | tuple[Message, ...]:
    """The prompt: text, or turns after the system column, or an instruction with its input."""
    if "instruction" in row.columns:
        return _read_instruction(row)
    return values.prompt(_with_system(row, row.get("prompt")), row.name("prompt"), row.dialect)


def _read_instruction(row: Columns) -> tuple[Message, ...]:
    """Alpaca's prompt as chat: system, earlier rounds, then the instruction and, on the next line,
    its input.
    """
    rounds = row.get("history") or []
    if not isinstance(rounds, list) or not all(
        isinstance(r, list | tuple) and len(r) == 2 for r in rounds
    ):
        raise UserError(
            f"{row.name('history')} is {values.shown(rounds)}, but must be a list of earlier "
            f"instructions, each with its answer",
            code="row-value-type",
            fix='write it as [["instruction", "answer"], ...]',
        )
    name, more = row.name("instruction"), row.get("input")
    question = values.text(row.get("instruction"), name) + (
        f"\n{values.text(more, row.name('input'))}" if more else ""
    )
    history = [
        turn for prompt, answer in rounds for turn in (("user", prompt), ("assistant", answer))
    ]
    turns = [{"role": role, "content": content} for role, content in (*history, ("user", question))]
    return values.check_prompt(values.turns(_with_system(row, turns), name, OPENAI), name)


def _read_shared_prompt(row: Columns) -> tuple[Content, tuple[Content, ...]]:
    """The prompt that chosen and rejected begin with, and the rest of both."""
    sides = {row.name(part): row.get(part) for part in ("chosen", "rejected")}
    shared = values.shared_prompt(row.get("chosen"), row.get("rejected"), row.dialect)
    answers = {
        name: side.removeprefix(shared)
        if isinstance(shared, str)
        else values.answer(side, name, row.dialect)
        for name, side in sides.items()
    }
    return values.exchange(shared, answers, row.tools)


def _with_system(row: Columns, turns: Any) -> Any:
    """Unparsed chat turns after the text of the system column."""
    system = row.get("system")
    if isinstance(turns, dict) and values.dialect_of(turns):
        turns = [turns]
    if not system or not isinstance(turns, list):
        return turns
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    dialect = values.dialect_of(first) or row.dialect
    if dialect.roles.get(str(first.get(dialect.role))) == "system":
        raise UserError(
            f"the row has a system turn, and also the column {row.name('system')}",
            code="row-system-twice",
            fix="remove one of the two",
        )
    return [{row.dialect.role: "system", row.dialect.content: system}, *turns]


def _read_conversation(row: Columns, *, to_learn: bool = False) -> tuple[Chat, Chat]:
    """A conversation as its prompt and the assistant's last turn.

    to_learn: leave out turns after the last one to learn from (whose weight is not 0).
    """
    name = row.name("messages")
    turns = values.turns(_with_system(row, row.get("messages")), name, row.dialect)
    if turns[-1]["role"] != "assistant":
        raise UserError(
            f"{name} ends with a {turns[-1]['role']} turn, so there is no answer to learn from",
            code="row-answer-missing",
            fix="remove the turns after the last assistant turn, or remove the row; to use only "
            f"the prompts, set keys: {{prompt: {name}}} on this file",
        )
    if to_learn:
        last = max(
            (
                i
                for i, turn in enumerate(turns)
                if turn["role"] == "assistant" and turn.get("weight") != 0
            ),
            default=-1,
        )
        turns = turns[: last + 1] or turns
    prompt = values.check_prompt(turns[:-1], name)
    return Chat(prompt, row.tools), Chat(values.check_answer(turns[-1:], name))


# Readers


def read_judgement(row: Columns) -> Judgement:
    prompt, (completion,) = _read_exchange(row, "completion")
    return _to_judgement(row, prompt, completion)


def read_judged_messages(row: Columns) -> Judgement:
    return _to_judgement(row, *_read_conversation(row))


def read_judged_ids(row: Columns) -> Judgement:
    prompt, completion = _read_ids(row, "prompt", "completion")
    return _to_judgement(row, prompt, completion)


def read_helpsteer(row: Columns) -> Judgement:
    """One column per attribute."""
    prompt, (completion,) = _read_exchange(row, "completion")
    scores = {name: row.parse(name, values.number, None) for name in HELPSTEER_ATTRIBUTES.split()}
    attributes = {name: score for name, score in scores.items() if score is not None}
    return Judgement(prompt=prompt, completion=completion, attributes=attributes, **row.common)


def _to_judgement(row: Columns, prompt: Content, completion: Content) -> Judgement:
    return Judgement(
        prompt=prompt,
        completion=completion,
        label=row.parse("label", values.label, None),
        score=row.parse("score", values.number, None),
        attributes=row.parse("scores", values.attributes, {}),
        error=str(row.get("error")) if has_failed(row.value, row.columns) else "",
        is_truncated=row.get("stop") == "length",
        **row.common,
    )


def has_failed(value: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row has an error instead of a score. columns: part of the format -> column."""
    score, error = columns.get("score", "score"), columns.get("error", "error")
    return score in value and value[score] is None and isinstance(value.get(error), str)


def read_preference(row: Columns) -> Preference:
    """Two answers to a prompt, or two conversations that begin with it."""
    if row.get("prompt") is None and "instruction" not in row.columns:
        prompt, (chosen, rejected) = _read_shared_prompt(row)
    else:
        prompt, (chosen, rejected) = _read_exchange(row, "chosen", "rejected")
    return _to_preference(row, prompt, chosen, rejected)


def read_preferred_ids(row: Columns) -> Preference:
    prompt, chosen, rejected = _read_ids(row, "prompt", "chosen", "rejected")
    return _to_preference(row, prompt, chosen, rejected)


def read_pairwise_feedback(row: Columns) -> Preference:
    """Label 1: output_A is the better one; 0: output_B."""
    prompt, (a, b) = _read_exchange(row, "output_A", "output_B")
    rewards = row.parse("reward_A", values.number, None), row.parse("reward_B", values.number, None)
    if None not in rewards and rewards[0] == rewards[1]:
        raise UserError(
            f"{row.name('reward_A')} and {row.name('reward_B')} are equal, so neither output is "
            "preferred",
            code="row-pair-tied",
            fix="remove the row",
        )
    return _to_preference(
        row, prompt, *((a, b) if values.label(row.get("label"), row.name("label")) else (b, a))
    )


def _to_preference(row: Columns, prompt: Content, chosen: Content, rejected: Content) -> Preference:
    if chosen == rejected:
        raise UserError(
            "the chosen and the rejected answer are the same",
            code="row-pair-identical",
            fix="remove the row, or correct one of the two answers",
        )
    return Preference(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        margin=row.parse("margin", values.number, 0.0),
        soft=row.parse("soft", values.probability, None),
        **row.common,
    )


def read_demonstration(row: Columns) -> Demonstration:
    prompt, (completion,) = _read_exchange(row, "completion")
    return Demonstration(prompt=prompt, completion=completion, **row.common)


def read_messages(row: Columns) -> Demonstration:
    prompt, completion = _read_conversation(row, to_learn=True)
    return Demonstration(prompt=prompt, completion=completion, **row.common)


def read_demonstrated_ids(row: Columns) -> Demonstration:
    prompt, completion = _read_ids(row, "prompt", "completion")
    return Demonstration(prompt=prompt, completion=completion, **row.common)


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
    return Sampled(logps, temperature, top_p, vocabulary if isinstance(vocabulary, str) else "")


def _read_ids(row: Columns, *parts: str) -> Iterable[Ids]:
    """The parts of a row as tokens, of which the first is the prompt, with their texts."""
    prompt, *completions = (values.ids(row.get(part), row.name(part)) for part in parts)
    sampled = _read_sampled(row, len(completions[0].ids))
    text, texts = _read_texts(row, parts[1:])
    return replace(prompt, readable=text), *(
        replace(completion, sampled=sampled, readable=text)
        for completion, text in zip(completions, texts, strict=True)
    )


def _read_texts(
    row: Columns, parts: Sequence[str]
) -> tuple[str | Chat | None, Sequence[str | Chat | None]]:
    """The texts of the prompt and of these answers, next to their tokens. None: it cannot be read,
    or the answer was truncated, so that its text does not show that it has no end.
    """
    nothing = [None] * len(parts)
    try:
        prompt = row.parse("prompt_text", partial(values.prompt, dialect=row.dialect), None)
        text = prompt if prompt is None or isinstance(prompt, str) else Chat(prompt, row.tools)
    except UserError:
        return None, nothing
    if prompt is None or row.get("stop") == "length":
        return text, nothing
    try:
        answers = {
            row.name(part): values.answer(row.get(part), row.name(part), row.dialect)
            for part in (f"{part}_text" for part in parts)
        }
        return values.exchange(prompt, answers, row.tools)
    except UserError:
        return text, nothing


def read_ranking(row: Columns) -> Ranking:
    """k answers with k scores, or k ranks from 1 (the best): a rank r becomes the score -r."""
    texts, name = row.get("completions"), row.name("completions")
    if not isinstance(texts, list) or len(texts) < 2:
        raise UserError(
            f"{name} is {values.shown(texts)}, but must be a list of two or more answers",
            code="row-value-type",
            fix="write all answers to the prompt as a list in one row",
        )
    answers = {
        f"answer {n} of {name}": values.answer(text, name, row.dialect)
        for n, text in enumerate(texts, 1)
    }
    prompt, completions = values.exchange(_parse_prompt(row), answers, row.tools)
    return Ranking(
        prompt=prompt, completions=completions, scores=_read_scores(row, len(texts)), **row.common
    )


def _read_scores(row: Columns, count: int) -> tuple[float, ...]:
    parts = [part for part in ("scores", "ranks") if row.get(part) is not None]
    if len(parts) != 1:
        raise UserError(
            f"the row has both {row.name('scores')} and {row.name('ranks')}"
            if parts
            else f"the row has neither {row.name('scores')} nor {row.name('ranks')}",
            code="row-scores-and-ranks" if parts else "row-scores-missing",
            fix="remove one of the two columns"
            if parts
            else f"add {row.name('scores')}, a list with a number for each answer, or "
            f"{row.name('ranks')}, a list of ranks from 1 (the best)",
        )
    value, name = row.get(parts[0]), row.name(parts[0])
    if not isinstance(value, list) or len(value) != count:
        raise UserError(
            f"{name} is {values.shown(value)}, but must be a list of {count} numbers",
            code="row-value-type",
            fix="write one number per answer, in the order of the answers",
        )
    numbers = tuple(values.number(v, f"number {n} of {name}") for n, v in enumerate(value, 1))
    if parts == ["scores"]:
        return numbers
    if any(rank < 1 or rank != int(rank) for rank in numbers):
        raise UserError(
            f"{name} is {values.shown(value)}, but each rank must be a whole number of at least 1",
            code="row-rank-invalid",
            fix="rank the best answer 1, the second best 2, and so on",
        )
    return tuple(-rank for rank in numbers)


def read_prompt(row: Columns) -> Prompt:
    """A prompt. All other columns, and the entries of ``info``, become its info."""
    prompt = _parse_prompt(row)
    if isinstance(prompt, str) and row.tools:
        raise UserError(
            "the row has tools, but its prompt is text",
            code="row-tools-without-turns",
            fix=values.TOOLS_FIX,
        )
    others = {name: value for name, value in row.value.items() if name not in row.columns.values()}
    common: dict[str, Any] = {**row.common, "info": {**row.info, **others}}
    return Prompt(prompt=prompt if isinstance(prompt, str) else Chat(prompt, row.tools), **common)


# The table


@dataclass(frozen=True, slots=True)
class Format:
    """A row format: its reader, the kind of its rows, its columns, and how its turns are written.

    ``need`` and ``may``: the columns (or dotted paths) that a row must and may have, in addition to
    ``weight`` and ``info``, which any row may have. ``parts``: column -> part, where they differ.
    """

    read: Callable[[Columns], Example]
    gives: Kind
    need: str
    may: str = ""
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    dialect: Dialect = OPENAI

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.need.split())

    @property
    def needed_parts(self) -> tuple[str, ...]:
        return tuple(self.parts.get(column, column) for column in self.need.split())

    @property
    def columns(self) -> tuple[str, ...]:
        renamed = set(self.parts.values())
        common = (name for name in ("weight", "info") if name not in renamed)
        return tuple(dict.fromkeys((*self.need.split(), *self.may.split(), *common)))


RATINGS = ("label", "score")
"""Parts that a person fills in, and may leave out."""
IDS = {
    "prompt_ids": "prompt",
    "completion_ids": "completion",
    "chosen_ids": "chosen",
    "rejected_ids": "rejected",
    "prompt": "prompt_text",
    "completion": "completion_text",
    "chosen": "chosen_text",
    "rejected": "rejected_text",
}
GENERATED = "logps sampled prompt completion rendered tools info stop version index parts"
"""Columns that `valence sample` and `valence score` write in addition to the tokens. Of text and
tokens, the tokens are used if the row has the digest of the model's vocabulary, else the text.
"""
HALOS = {"output": "completion", "reward": "score"}
NEMO = {"response": "completion", "preference": "label"}
HELPSTEER = {"response": "completion"}
HELPSTEER_ATTRIBUTES = "helpfulness correctness coherence complexity verbosity"
OPENRLHF = {"input": "prompt", "output": "completion"}
OPENAI_PAIR = {
    "input.messages": "prompt",
    "input.tools": "tools",
    "preferred_output": "chosen",
    "non_preferred_output": "rejected",
}
SHARED = {"conversations": "messages", "kto_tag": "label"}
ALPACA = {"output": "completion", "kto_tag": "label"}
MORE = "input system history"

FORMATS: dict[str, Format] = {
    "judgement": Format(
        read_judgement, "judgement", "prompt completion label", "score scores tools"
    ),
    "scored": Format(
        read_judgement, "judgement", "prompt completion score", "scores tools error parts"
    ),
    "attributes": Format(read_judgement, "judgement", "prompt completion scores", "tools"),
    "judged_messages": Format(
        read_judged_messages, "judgement", "messages label", "score scores tools"
    ),
    "scored_messages": Format(read_judged_messages, "judgement", "messages score", "scores tools"),
    "preference": Format(
        read_preference, "preference", "chosen rejected", "prompt margin soft tools"
    ),
    "demonstration": Format(read_demonstration, "demonstration", "prompt completion", "tools"),
    "messages": Format(read_messages, "demonstration", "messages", "tools"),
    "ranking": Format(read_ranking, "ranking", "prompt completions", "scores ranks tools"),
    "prompt": Format(read_prompt, "prompt", "prompt", "tools"),
    "text_prompt": Format(read_prompt, "prompt", "text", parts={"text": "prompt"}),
    # Token ids, used without tokenization
    "judgement_ids": Format(
        read_judged_ids,
        "judgement",
        "prompt_ids completion_ids label",
        f"score error {GENERATED}",
        IDS,
    ),
    "scored_ids": Format(
        read_judged_ids, "judgement", "prompt_ids completion_ids score", f"error {GENERATED}", IDS
    ),
    "preference_ids": Format(
        read_preferred_ids,
        "preference",
        "prompt_ids chosen_ids rejected_ids",
        "margin soft prompt chosen rejected tools sampled",
        IDS,
    ),
    "demonstration_ids": Format(
        read_demonstrated_ids, "demonstration", "prompt_ids completion_ids", GENERATED, IDS
    ),
    # HALOs: the output of its labelling script
    "binary_feedback": Format(
        read_judgement, "judgement", "prompt output label", "reward type", HALOS
    ),
    "scalar_feedback": Format(read_judgement, "judgement", "prompt output reward", "type", HALOS),
    "pairwise_feedback": Format(
        read_pairwise_feedback,
        "preference",
        "prompt output_A output_B label",
        "reward_A reward_B type",
    ),
    # HelpSteer, NeMo-Aligner, ColossalChat, OpenRLHF
    "helpsteer": Format(
        read_helpsteer,
        "judgement",
        "prompt response helpfulness",
        "correctness coherence complexity verbosity",
        HELPSTEER,
    ),
    "nemo_aligner": Format(read_judgement, "judgement", "prompt response preference", "", NEMO),
    "colossalchat": Format(
        read_judgement, "judgement", "prompt completion label", "", dialect=COLOSSAL
    ),
    "openrlhf": Format(read_judgement, "judgement", "input output label", "", OPENRLHF),
    "openrlhf_preference": Format(
        read_preference, "preference", "input chosen rejected", "margin soft", OPENRLHF
    ),
    "openai_preference": Format(
        read_preference,
        "preference",
        "input.messages preferred_output non_preferred_output",
        "input.tools margin soft",
        OPENAI_PAIR,
    ),
    # LLaMA-Factory
    "sharegpt": Format(
        read_messages, "demonstration", "conversations", "system tools", SHARED, SHAREGPT
    ),
    "sharegpt_kto": Format(
        read_judged_messages, "judgement", "conversations kto_tag", "system tools", SHARED, SHAREGPT
    ),
    "sharegpt_preference": Format(
        read_preference,
        "preference",
        "conversations chosen rejected",
        "system tools",
        {"conversations": "prompt"},
        SHAREGPT,
    ),
    "alpaca": Format(read_demonstration, "demonstration", "instruction output", MORE, ALPACA),
    "alpaca_kto": Format(read_judgement, "judgement", "instruction output kto_tag", MORE, ALPACA),
    "alpaca_preference": Format(read_preference, "preference", "instruction chosen rejected", MORE),
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
        f.parts.get(column, column): keys.get(column, column)
        for column in f.columns
        if column in f.required or column in keys or column not in keys.values()
    }


def _is_missing(row: Columns, part: str) -> bool:
    """Whether a row does not have a part, such as a rating of blanks alone."""
    value = row.get(part)
    return value is None or (part in RATINGS and isinstance(value, str) and not value.strip())


def _missing_columns(
    name: str, value: Mapping[str, Any], missing: Mapping[str, str], *, is_rating: bool
) -> UserError:
    """The error for a row without columns that its format needs.

    missing: the format's name of each column -> its name in the file. is_rating: only the rating
    is missing.
    """
    absent = {column: there for column, there in missing.items() if there not in value}
    keys = ", ".join(f"{column}: COLUMN" for column in absent)
    renamed = f"; if the file has {'it' if len(absent) == 1 else 'them'} under another name, set "
    renamed = f"{renamed}keys: {{{keys}}} on this file" if absent else ""
    columns = " and ".join(missing.values())
    if is_rating:
        return UserError(
            f"the row has no rating: {columns} is {'missing' if absent else 'empty'}",
            code="row-rating-missing",
            fix=f"rate the answer, or remove the row{renamed}",
        )
    return UserError(
        f"the row has no {' and no '.join(missing.values())}, which the format {name} needs",
        code="row-column-missing",
        fix=f"add {columns}, or put rows of another format into a separate file{renamed}",
    )


def read_example(
    name: str, value: Mapping[str, Any], origin: Origin, keys: Mapping[str, str] | None = None
) -> Example:
    """The Example of a row of this format.

    Raises UserError, without the place, if the row is invalid.
    """
    f, columns = FORMATS[name], columns_read(name, keys or {})
    row = Columns(value, columns, f.dialect, origin)
    missing = {
        column: part
        for column, part in zip(f.need.split(), f.needed_parts, strict=True)
        if _is_missing(row, part) and not (part == "score" and has_failed(value, columns))
    }
    if missing:
        raise _missing_columns(
            name,
            value,
            {column: columns[part] for column, part in missing.items()},
            is_rating=set(RATINGS).issuperset(missing.values()),
        )
    kind = value.get("type")
    if "type" in f.columns and kind is not None and kind != name:
        raise UserError(
            f"type of the row is {values.shown(kind)}, but this file is read as {name}",
            code="row-type-differs",
            fix="put rows of each type into a separate file",
        )
    return f.read(row)
