"""The pieces of a row: labels, numbers, chat turns, prompts and the answers to them. All are parsed strictly.

Every function raises UserError with what is wrong and its remedy; the caller adds the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from valence.errors import UserError
from valence.types import Chat, Content, Ids, Message

UP = frozenset({"true", "1", "chosen", "good", "desirable", "👍", "thumbs_up", "up", "+1"})
DOWN = frozenset({"false", "0", "rejected", "bad", "undesirable", "👎", "thumbs_down", "down", "-1"})
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """How a chat turn is written: the names of its role and its content, and what each role means."""

    role: str
    content: str
    roles: Mapping[str, str]


ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
OPENAI = Dialect("role", "content", ROLES)
SHAREGPT = Dialect("from", "value", {**ROLES, "human": "user", "gpt": "assistant", "observation": "tool"})
COLOSSAL = Dialect("from", "content", {**ROLES, "human": "user"})


def label(value: object, name: str) -> bool:
    """Thumbs up or down."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        raise UserError(
            f"{name} is the number {value}, and a label is true or false",
            fix="write true or false, or give a graded judgement in a column called score",
        )
    word = value.strip().casefold() if isinstance(value, str) else str(value) if value in (0, 1) else ""
    if word not in UP | DOWN:
        raise UserError(
            f"{name} is {shown(value)}, which is not a label",
            fix="write true or false, 1 or 0, chosen or rejected, good or bad, up or down",
        )
    return word in UP


def number(value: object, name: str) -> float:
    """A finite number, also when a csv wrote it as text."""
    try:
        result = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        result = None
    if result is None or not math.isfinite(result):
        raise UserError(f"{name} is {shown(value)}, and must be a finite number", fix=f"mend {name} or leave the row out")
    return result


def weight(value: object, name: str) -> float:
    """A finite number that is not negative."""
    result = number(value, name)
    if result < 0:
        raise UserError(
            f"{name} is {result}, and must not be negative",
            fix="use a weight of 0 or more; to learn against an answer, judge it false",
        )
    return result


def probability(value: object, name: str) -> float:
    """A number from 0 to 1."""
    result = number(value, name)
    if not 0 <= result <= 1:
        raise UserError(
            f"{name} is {result:g}, and must be a probability",
            fix="give a number from 0 to 1: how likely it is that the chosen answer is the better one",
        )
    return result


def attributes(value: object, name: str) -> dict[str, float]:
    """Scores by the name of what they are about. Null (a table's filling) is a score that was not given."""
    if not isinstance(value, Mapping) or not all(isinstance(each, str) and each for each in value):
        raise UserError(
            f"{name} is {shown(value)}, and must be an object of attributes with a score each",
            fix='write {"helpfulness": 3, "correctness": 4}; a column that holds anything else needs another name',
        )
    found = {each: number(score, f"{each} in {name}") for each, score in value.items() if score is not None}
    if not found:
        raise UserError(f"{name} has no score", fix="give at least one attribute a score, or leave the row out")
    return found


def ids(value: object, name: str) -> Ids:
    """Token ids: a list of integers from 0, at least one."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    ):
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of token ids", fix="write a list of one or more integers from 0"
        )
    return Ids(tuple(value))


def logps(value: object, name: str) -> tuple[float, ...]:
    """Log-probabilities in nats, as a list."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{name} is {shown(value)}, and must be a list of log-probabilities", fix="give one for every token")
    found = tuple(number(each, f"number {n} of {name}") for n, each in enumerate(value, 1))
    if max(found) > 1e-3:
        raise UserError(f"{name} has {max(found)}, and a log-probability is 0 at most", fix="give natural logarithms")
    return found


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """An object, whatever is in it."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {shown(value)}, and must be an object", fix=f"mend {name} or leave it out")
    return value


def tools(value: object, name: str) -> tuple[Mapping[str, Any], ...]:
    """Descriptions of tools: a list of objects, or that list written as JSON text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # what cannot be read stays text, and is refused below
            value = json.loads(value) if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of objects",
            fix="write each tool as the JSON schema that the chat template shows",
        )
    return tuple(value)


def turns(value: object, name: str, dialect: Dialect) -> tuple[Message, ...]:
    """Chat turns, at least one, each with one of the four roles."""
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{name} is {shown(value)}, and must be a list of chat turns",
            fix=f'write [{{"{dialect.role}": "...", "{dialect.content}": "..."}}, ...]',
        )
    return tuple(_turn(turn, f"turn {number} of {name}", dialect) for number, turn in enumerate(value, 1))


def _turn(value: object, name: str, dialect: Dialect) -> Message:
    if not isinstance(value, dict):
        raise UserError(
            f"{name} is {shown(value)}, and must be a chat turn",
            fix=f'write {{"{dialect.role}": "user", "{dialect.content}": "..."}}',
        )
    given, content = value.get(dialect.role), value.get(dialect.content)
    role = dialect.roles.get(given) if isinstance(given, str) else None
    if role is None:
        raise UserError(f"{name} has {dialect.role} {shown(given)}", fix=f"use one of {', '.join(dialect.roles)}")
    # A table's file format fills in null for what a turn does not have.
    rest = {k: v for k, v in value.items() if k not in (dialect.role, dialect.content) and v is not None}
    if not isinstance(content, str) and not (content is None and role == "assistant" and rest.get("tool_calls")):
        raise UserError(
            f"{name} has {dialect.content} {shown(content)}, and must have text",
            fix="write one string (join the parts when it is a list of texts)",
        )
    return {"role": role, "content": content, **rest}


def prompt(value: object, name: str, dialect: Dialect) -> str | tuple[Message, ...]:
    """A prompt as text, or as turns of which the last is to be answered."""
    if not isinstance(value, str):
        return check_prompt(turns(value, name, dialect), name)
    if not value:
        raise UserError(f"{name} is empty", fix="give the text that the answer follows")
    return text(value, name)


def check_prompt(given: Sequence[Message], name: str) -> tuple[Message, ...]:
    """The turns, when an answer can follow them: they end with a user or tool turn."""
    if not given or given[-1]["role"] not in ("user", "tool"):
        end = f"ends with a turn of the {given[-1]['role']}" if given else "has no turns"
        raise UserError(
            f"the prompt in {name} {end}, and an answer is to follow",
            fix="end the prompt with a user (or tool) turn, right before the assistant's answer",
        )
    return tuple(given)


def answer(value: object, name: str, dialect: Dialect) -> str | tuple[Message, ...]:
    """An answer as text or as turns (one object, or a list), which may still have the prompt in front."""
    if isinstance(value, str):
        return text(value, name)
    return turns([value] if isinstance(value, dict) else value, name, dialect)


def text(value: object, name: str) -> str:
    """Text that is not a list of chat turns in disguise, as a csv would have it."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {shown(value)}, and must be text", fix="write one string")
    if CHAT_AS_TEXT.match(value):
        raise UserError(
            f"{name} is a list of chat turns written as text",
            fix=("store the list itself, in jsonl or parquet; as text the model would be shown its brackets and quotes"),
        )
    return value


def exchange(
    asked: str | tuple[Message, ...], answers: Mapping[str, str | tuple[Message, ...]], offered: tuple[Mapping[str, Any], ...]
) -> tuple[Content, tuple[Content, ...]]:
    """A prompt with its answers (by the name of their column), as text if all of it is text, else as chat.

    In a chat, a text prompt is a user turn, a text answer an assistant turn, and a prompt repeated in answers is cut.
    """
    if isinstance(asked, str) and all(isinstance(given, str) for given in answers.values()):
        if offered:
            raise UserError("the row has tools, and its prompt is text", fix="write the prompt as a list of chat turns")
        return asked, tuple(_check_not_empty(str(given), name) for name, given in answers.items())
    opening = ({"role": "user", "content": asked},) if isinstance(asked, str) else asked
    following: list[Content] = []
    for name, given in answers.items():
        told = ({"role": "assistant", "content": given},) if isinstance(given, str) else given
        following.append(Chat(check_answer(told[len(opening) :] if told[: len(opening)] == opening else told, name)))
    return Chat(opening, offered), tuple(following)


def _check_not_empty(given: str, name: str) -> str:
    if not given.strip():
        raise UserError(f"{name} is empty", fix="leave out rows without an answer")
    return given


def check_answer(given: Sequence[Message], name: str) -> tuple[Message, ...]:
    """The turns, when they are an answer: the assistant's, with tool results between, none of them empty."""
    for turn in given:
        if turn["role"] == "assistant" and not turn.get("tool_calls"):
            _check_not_empty(turn["content"], name)
    wrong = next((turn["role"] for turn in given if turn["role"] not in ("assistant", "tool")), None)
    if wrong is not None:
        raise UserError(
            f"{name} has a {wrong} turn that is not part of the prompt",
            fix="give only the turns that follow the prompt, or repeat the prompt exactly",
        )
    if not given or given[0]["role"] != "assistant" or given[-1]["role"] != "assistant":
        raise UserError(f"{name} is not an answer of the assistant", fix="begin and end it with an assistant turn")
    return tuple(given)


def shared_prompt(chosen: object, rejected: object, dialect: Dialect) -> str | tuple[Message, ...]:
    """The prompt that two whole conversations begin with. Text is split before its last ``Assistant:`` answer."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        head, mark, _ = chosen.rpartition("\n\nAssistant:")
        if not mark or rejected.rpartition("\n\nAssistant:")[0] != head:
            raise UserError("the row has no prompt, and chosen and rejected do not share one", fix="add a column called prompt")
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
            fix="add a column called prompt, or begin both sides with it",
        )
    return first[:same]


def shown(value: object) -> str:
    """A value as a message can show it: short."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
