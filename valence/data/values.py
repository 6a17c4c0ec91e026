"""The pieces of a row: labels, numbers, chat turns, prompts and the answers to them.

All are parsed strictly.

Every function raises UserError with what is wrong and its remedy; the caller adds the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from valence.errors import UserError
from valence.types import Chat, Content, Ids, Message

UP = frozenset(
    {
        "true",
        "yes",
        "1",
        "+1",
        "1.0",
        "chosen",
        "good",
        "desirable",
        "positive",
        "up",
        "like",
        "upvote",
        "thumbsup",
        "thumbup",
        "👍",
    }
)
DOWN = frozenset(
    {
        "false",
        "no",
        "0",
        "-1",
        "0.0",
        "-1.0",
        "rejected",
        "bad",
        "undesirable",
        "negative",
        "down",
        "dislike",
        "downvote",
        "thumbsdown",
        "thumbdown",
        "👎",
    }
)
TWO_WORDS = re.compile(r"(thumbs?)[\s_-]*(up|down)|(up|down)[\s_-]*(vote)")
"""Labels that tools write as one word or two, with or without a separator, after lower-casing."""
SHORT_CODE = re.compile(r":(\+1|-1|thumbs?[_-]?(?:up|down)):")
"""Emoji as chat programs export them, such as ``:+1:``."""
SKIN_TONE = re.compile("(:skin-tone-[2-6]:|[\U0001f3fb-\U0001f3ff]|\ufe0f)$")
"""What may follow a thumb."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LABEL_FIX = (
    "write true or false, 1 or 0 (or -1), yes or no, up or down, chosen or rejected, good or "
    "bad, positive or negative, "
    "like or dislike, thumbs_up or thumbs_down, :+1: or :-1:, upvote or downvote; put graded "
    "ratings into a column called score"
)
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text."""


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """How a chat turn is written: the names of its role and its content, and what each role
    means.
    """

    role: str
    content: str
    roles: Mapping[str, str]


ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
}
"""Role as tools write it -> one of the four that chat templates know."""
OPENAI = Dialect("role", "content", ROLES)
SHAREGPT = Dialect("from", "value", {**ROLES, "observation": "tool"})
COLOSSAL = Dialect("from", "content", ROLES)


def label(value: object, name: str) -> bool:
    """Thumbs up or down."""
    verdict = thumb(value)
    if verdict is None:
        raise UserError(
            f"{name} is {shown(value)}, which is not a label",
            code="row-label-invalid",
            fix=LABEL_FIX,
        )
    return verdict


def thumb(value: object) -> bool | None:
    """True for thumbs up, False for thumbs down, and None for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        word = str(int(value)) if value in (-1, 0, 1) else ""
    else:
        word = SKIN_TONE.sub("", value.strip().casefold()) if isinstance(value, str) else ""
        code = SHORT_CODE.fullmatch(word)
        word = code[1] if code else word
        parts = TWO_WORDS.fullmatch(word)
        word = "".join(part or "" for part in parts.groups()) if parts else word
    return True if word in UP else False if word in DOWN else None


def number(value: object, name: str) -> float:
    """A finite number, also when a csv wrote it as text."""
    result = as_number(value)
    if result is None:
        comma = isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+,[0-9]+\s*", value)
        raise UserError(
            f"{name} is {shown(value)}, and must be a finite number",
            code="row-decimal-comma" if comma else "row-number-invalid",
            fix="write a decimal point instead of the comma"
            if comma
            else f"correct {name} or remove the row",
        )
    return result


def as_number(value: object) -> float | None:
    """A finite number, or one written as text in ASCII digits; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not NUMBER.fullmatch(value.strip()):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def weight(value: object, name: str) -> float:
    """A finite number that is not negative."""
    result = number(value, name)
    if result < 0:
        raise UserError(
            f"{name} is {result}, and must not be negative",
            code="row-number-range",
            fix="use a weight of 0 or more; to train against an answer, label it false",
        )
    return result


def probability(value: object, name: str) -> float:
    """A number from 0 to 1."""
    result = number(value, name)
    if not 0 <= result <= 1:
        raise UserError(
            f"{name} is {result:g}, and must be a probability",
            code="row-number-range",
            fix="give a number from 0 to 1: how likely it is that the chosen answer is the "
            "better one",
        )
    return result


def attributes(value: object, name: str) -> dict[str, float]:
    """Scores by the name of what they are about.

    Null (a table's filling) is a score that was not given.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise UserError(
            f"{name} is {shown(value)}, and must be an object of attributes with a score each",
            code="row-value-type",
            fix='write {"helpfulness": 3, "correctness": 4}; rename a column with other content',
        )
    scores = {
        attribute: number(score, f"{attribute} in {name}")
        for attribute, score in value.items()
        if score is not None
    }
    if not scores:
        raise UserError(
            f"{name} has no score",
            code="row-scores-empty",
            fix="give at least one attribute a score, or remove the row",
        )
    return scores


def ids(value: object, name: str) -> Ids:
    """Token ids: a list of integers from 0, at least one."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    ):
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of token ids",
            code="row-tokens-invalid",
            fix="write a list of one or more integers from 0",
        )
    return Ids(tuple(value))


def logps(value: object, name: str) -> tuple[float, ...]:
    """Log-probabilities in nats, as a list."""
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of log-probabilities",
            code="row-logps-invalid",
            fix="give one for every token",
        )
    numbers = tuple(number(item, f"number {n} of {name}") for n, item in enumerate(value, 1))
    if max(numbers) > 1e-3:
        raise UserError(
            f"{name} has {max(numbers)}, and a log-probability is 0 at most",
            code="row-logps-invalid",
            fix="give natural logarithms",
        )
    return numbers


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """An object, whatever is in it."""
    if not isinstance(value, Mapping):
        raise UserError(
            f"{name} is {shown(value)}, and must be an object",
            code="row-value-type",
            fix=f"correct or remove {name}",
        )
    return value


def info(value: object, name: str) -> Mapping[str, Any]:
    """Metadata of a row: an object, also one written as JSON text.

    Any other value keeps the name of its column.
    """
    parsed = value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(value)
    return parsed if isinstance(parsed, dict) else {name: value}


def tools(value: object, name: str) -> tuple[Mapping[str, Any], ...]:
    """Descriptions of tools: a list of objects, or that list written as JSON text."""
    if isinstance(value, str):
        # what cannot be read stays text, and is refused below
        with suppress(ValueError, RecursionError):
            value = json.loads(value) if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of objects",
            code="row-value-type",
            fix="write each tool as the JSON schema that the chat template shows",
        )
    return tuple(value)


def turns(value: object, name: str, dialect: Dialect) -> tuple[Message, ...]:
    """Chat turns, at least one, each with one of the four roles."""
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of chat turns",
            code="row-value-type",
            fix=f'write [{{"{dialect.role}": "...", "{dialect.content}": "..."}}, ...]',
        )
    return tuple(
        _turn(turn, f"turn {number} of {name}", dialect) for number, turn in enumerate(value, 1)
    )


def _turn(value: object, name: str, dialect: Dialect) -> Message:
    if not isinstance(value, dict):
        raise UserError(
            f"{name} is {shown(value)}, and must be a chat turn",
            code="row-value-type",
            fix=f'write {{"{dialect.role}": "user", "{dialect.content}": "..."}}',
        )
    dialect = dialect_of(value) or dialect
    name_of_role, content = value.get(dialect.role), value.get(dialect.content)
    role = dialect.roles.get(name_of_role) if isinstance(name_of_role, str) else None
    if role is None:
        raise UserError(
            f"{name} has {dialect.role} {shown(name_of_role)}",
            code="row-role-invalid",
            fix=f"use one of {', '.join(dialect.roles)}",
        )
    # A table's file format fills in null for what a turn does not have.
    rest = {
        k: v for k, v in value.items() if k not in (dialect.role, dialect.content) and v is not None
    }
    if isinstance(content, list):
        content = parts_as_text(content, f"{dialect.content} of {name}") if content else None
    if not isinstance(content, str) and not (
        content is None and role == "assistant" and rest.get("tool_calls")
    ):
        raise UserError(
            f"{name} has {dialect.content} {shown(content)}, and must have text",
            code="row-content-invalid",
            fix="write one string",
        )
    turn_weight = rest.pop("weight", 1)
    if isinstance(turn_weight, bool) or turn_weight not in (0, 1):
        raise UserError(
            f"weight of {name} is {shown(turn_weight)}, and must be 0 or 1",
            code="row-weight-invalid",
            fix="write 0 for a turn that is not trained "
            "on; the weight of the row is a separate column",
        )
    ignored = {"weight": 0} if role == "assistant" and turn_weight == 0 else {}
    return {"role": role, "content": content, **rest, **ignored}


def dialect_of(turn: Mapping[Any, Any]) -> Dialect | None:
    """The dialect whose role and content this turn has."""
    return next(
        (d for d in (OPENAI, SHAREGPT, COLOSSAL) if d.role in turn and d.content in turn), None
    )


def is_parts(value: object) -> bool:
    """Whether this is content in parts, as OpenAI and Bedrock write it, and not a list of chat
    turns.
    """
    if not isinstance(value, list) or not all(
        isinstance(part, dict) and not {"role", "from"} & part.keys() for part in value
    ):
        return False
    return any(part.get("type") in TEXT_PARTS or part.keys() == {"text"} for part in value)


def parts_as_text(parts: Sequence[object], name: str) -> str:
    """The text of content in parts, one below the other.

    Raises UserError for a part that is not text.
    """
    texts: list[str] = []
    for number, part in enumerate(parts, 1):
        text_of = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind is not None and kind not in TEXT_PARTS:
            raise UserError(
                f"part {number} of {name} has type {shown(kind)}, and only text can be trained on",
                code="row-content-parts",
                fix="remove rows with images, audio or files, or replace these parts by text",
            )
        if not isinstance(text_of, str):
            raise UserError(
                f"part {number} of {name} has no text",
                code="row-content-parts",
                fix='write {"type": "text", "text": "..."}',
            )
        texts.append(text_of)
    return "\n".join(texts)


def prompt(value: object, name: str, dialect: Dialect) -> str | tuple[Message, ...]:
    """A prompt as text, or as turns of which the last is to be answered.

    One turn may stand without its list.
    """
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list):
        raise UserError(
            f"{name} is an object with the chat turns in its messages",
            code="row-nested-messages",
            fix=f"set their place: keys: {{prompt: {name}.messages}}",
        )
    if is_parts(value):
        value = parts_as_text(cast(list[object], value), name)
    if not isinstance(value, str):
        return check_prompt(
            turns([value] if isinstance(value, dict) else value, name, dialect), name
        )
    if not value:
        raise UserError(
            f"{name} is empty", code="row-prompt-empty", fix="give the text that the answer follows"
        )
    return text(value, name)


def check_prompt(messages: Sequence[Message], name: str) -> tuple[Message, ...]:
    """The turns, when an answer can follow them: they end with a user or tool turn."""
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        end = f"ends with a turn of the {messages[-1]['role']}" if messages else "has no turns"
        raise UserError(
            f"the prompt in {name} {end}, and an answer is to follow",
            code="row-prompt-end",
            fix="end the prompt with a user (or tool) turn, right before the assistant's answer",
        )
    return tuple(messages)


def answer(value: object, name: str, dialect: Dialect) -> str | tuple[Message, ...]:
    """An answer as text or as turns (one object, or a list), which may still have the prompt in
    front.
    """
    if is_parts(value):
        value = parts_as_text(cast(list[object], value), name)
    if isinstance(value, str):
        return text(value, name)
    return turns([value] if isinstance(value, dict) else value, name, dialect)


def text(value: object, name: str) -> str:
    """Text that is not a list of chat turns in disguise, as a csv would have it."""
    if not isinstance(value, str):
        raise UserError(
            f"{name} is {shown(value)}, and must be text",
            code="row-value-type",
            fix="write one string",
        )
    if CHAT_AS_TEXT.match(value):
        raise UserError(
            f"{name} is a list of chat turns written as text",
            code="row-turns-as-text",
            fix=(
                "store the list itself, in jsonl or parquet; as text, the model would "
                "see its brackets and quotes"
            ),
        )
    return value


def exchange(
    prompt: str | tuple[Message, ...],
    answers: Mapping[str, str | tuple[Message, ...]],
    offered: tuple[Mapping[str, Any], ...],
) -> tuple[Content, tuple[Content, ...]]:
    """A prompt with its answers (by the name of their column), as text if all of it is text, else
    as chat.

    In a chat, a text prompt is a user turn, a text answer an assistant turn, and a prompt repeated
    in answers is cut.
    """
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers.values()):
        if offered:
            raise UserError(
                "the row has tools, and its prompt is text",
                code="row-tools-without-turns",
                fix="write the prompt as a list of chat turns",
            )
        return prompt, tuple(
            _check_not_empty(str(answer), name) for name, answer in answers.items()
        )
    opening = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    following: list[Content] = []
    for name, answer in answers.items():
        messages = (
            ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer
        )
        following.append(
            Chat(
                check_answer(
                    messages[len(opening) :] if messages[: len(opening)] == opening else messages,
                    name,
                )
            )
        )
    return Chat(opening, offered), tuple(following)


def _check_not_empty(text: str, name: str) -> str:
    if not text.strip():
        raise UserError(
            f"{name} is empty", code="row-completion-empty", fix="remove rows without an answer"
        )
    return text


def check_answer(messages: Sequence[Message], name: str) -> tuple[Message, ...]:
    """The turns, when they are an answer: the assistant's, with tool results between, none of them
    empty.
    """
    for turn in messages:
        if turn["role"] == "assistant" and not turn.get("tool_calls"):
            _check_not_empty(turn["content"], name)
    wrong = next(
        (turn["role"] for turn in messages if turn["role"] not in ("assistant", "tool")), None
    )
    if wrong is not None:
        raise UserError(
            f"{name} has a {wrong} turn that is not part of the prompt",
            code="row-completion-turns",
            fix="give only the turns that follow the prompt, or repeat the prompt exactly",
        )
    if not messages or messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        raise UserError(
            f"{name} is not an answer of the assistant",
            code="row-completion-not-assistant",
            fix="begin and end it with an assistant turn",
        )
    if messages and all(
        turn.get("weight") == 0 for turn in messages if turn["role"] == "assistant"
    ):
        raise UserError(
            f"{name} has an answer with weight 0, so it is not trained on",
            code="row-weight-zero",
            fix="remove the row, or the weight of the turn to train on",
        )
    return tuple(messages)


def shared_prompt(chosen: object, rejected: object, dialect: Dialect) -> str | tuple[Message, ...]:
    """The prompt that two whole conversations begin with.

    Text is split before its last ``Assistant:`` answer.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        head, mark, _ = chosen.rpartition("\n\nAssistant:")
        if not mark or rejected.rpartition("\n\nAssistant:")[0] != head:
            raise UserError(
                "the row has no prompt, and chosen and rejected do not share one",
                code="row-prompt-not-shared",
                fix="add a column called prompt",
            )
        return head + mark
    first, second = turns(chosen, "chosen", dialect), turns(rejected, "rejected", dialect)
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    while same and first[same - 1]["role"] not in ("user", "tool"):
        same -= 1
    if not same:
        raise UserError(
            "the row has no prompt, and chosen and rejected do not begin with the same user turn",
            code="row-prompt-not-shared",
            fix="add a column called prompt, or begin both sides with it",
        )
    return first[:same]


def shown(value: object) -> str:
    """A value as a message can show it: short."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
