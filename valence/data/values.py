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
from itertools import chain, takewhile
from typing import Any, cast

from valence.errors import UserError
from valence.types import Chat, Ids, Message

TextOrTurns = str | tuple[Message, ...]
"""A prompt or an answer."""
UP = frozenset([
    "true", "yes", "1", "+1", "1.0", "chosen", "good", "desirable", "positive", "up", "like",
    "liked", "happy", "satisfied", "helpful", "useful", "correct", "upvote", "thumbsup", "thumbup",
    "👍",
])  # fmt: skip
DOWN = frozenset([
    "false", "no", "0", "-1", "0.0", "-1.0", "rejected", "bad", "undesirable", "negative", "down",
    "dislike", "disliked", "unhappy", "dissatisfied", "unsatisfied", "unhelpful", "incorrect",
    "wrong", "downvote", "thumbsdown", "thumbdown", "👎", "not helpful", "not useful",
])  # fmt: skip
TIES = frozenset([
    "tie", "tied", "draw", "equal", "same", "both", "neither", "none", "both_bad", "bothbad",
    "both_good", "tie (bothbad)", "no preference",
])  # fmt: skip
"""Verdicts on two answers of which neither is the better one."""
VERDICT_PREFIXES = ("model", "response", "answer", "output", "completion", "assistant", "option")
FIRST, SECOND = frozenset(("first", "left")), frozenset(("second", "right"))
"""Verdicts that name an answer by its place."""
TWO_WORDS = re.compile(r"\A(?:(thumbs?)[\s_-]*(up|down)|(up|down)[\s_-]*(vote))\Z")
"""Labels that tools write as one word or two, with or without a separator, after lower-casing."""
SHORT_CODE = re.compile(r"\A:(\+1|-1|thumbs?[_-]?(?:up|down)):\Z")
"""Emoji as chat programs export them, such as ``:+1:``."""
SKIN_TONE = re.compile("(:skin-tone-[2-6]:|[\U0001f3fb-\U0001f3ff]|\ufe0f)$")
"""What may follow a thumb."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
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

    @property
    def example(self) -> str:
        return f'{{"{self.role}": "user", "{self.content}": "..."}}'


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "tool": "tool",
    "assistant": "assistant",
    "bot": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
}
"""Role as tools write it -> one of the four that chat templates know."""
ROUND = {**ROLES, "input": "user", "output": "assistant"}
"""Names of the texts in a round, in their order -> the role."""
OPENAI = Dialect("role", "content", ROLES)
SHAREGPT = Dialect("from", "value", {**ROLES, "observation": "tool"})
COLOSSAL = Dialect("from", "content", ROLES)


def label(value: object, name: str) -> bool:
    """Thumbs up or down."""
    verdict = thumb(value)
    if verdict is None:
        raise UserError(
            f"{name} is {shown(value)}, which is not a label (thumbs up or down)",
            code="row-label-invalid",
            fix="write true or false (other words are 1 and 0 or -1, yes and no, up and down, like "
            "and dislike, thumbs_up and thumbs_down, upvote and downvote, :+1: and :-1:, good and "
            "bad, positive and negative, chosen and rejected); to read graded ratings as scores, "
            f"set keys: {{score: {name}}} on this file",
        )
    return verdict


def thumb(value: object) -> bool | None:
    """True for thumbs up, False for thumbs down, and None for anything else."""
    word = str(int(value)) if isinstance(value, int | float) and value in (-1, 0, 1) else ""
    if isinstance(value, str):
        word = SHORT_CODE.sub(r"\1", SKIN_TONE.sub("", value.strip().casefold()))
        word = TWO_WORDS.sub(r"\1\2\3\4", word)
    return True if word in UP else False if word in DOWN else None


def number(value: object, name: str) -> float:
    """A finite number, also when a csv wrote it as text."""
    result = as_number(value)
    if result is None:
        has_comma = isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+,[0-9]+\s*", value)
        code, fix = "row-number-invalid", "write a number, or remove the row"
        if has_comma:
            code, fix = "row-decimal-comma", "write a decimal point instead of the comma"
        raise wrong_type(value, name, "a finite number", fix, code)
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
    fix = "write a weight of 0 or more; to train against an answer, set its label to false"
    return _in_range(value, name, math.inf, "must not be negative", fix)


def probability(value: object, name: str) -> float:
    """A number from 0 to 1."""
    fix = "write a number from 0 to 1: the probability that the chosen answer is the better one"
    return _in_range(value, name, 1, "must be a probability", fix)


def _in_range(value: object, name: str, highest: float, condition: str, fix: str) -> float:
    result = number(value, name)
    if not 0 <= result <= highest:
        raise UserError(f"{name} is {result:g}, but {condition}", code="row-number-range", fix=fix)
    return result


def attributes(value: object, name: str) -> dict[str, float]:
    """Scores by the name of what they are about.

    Null (a table's filling) is a score that was not given.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        fix = f'write {{"helpfulness": 3}}, or rename the column if {name} has another meaning'
        raise wrong_type(value, name, "an object with a score for each attribute", fix)
    scores = {
        attribute: number(score, f"{attribute} in {name}")
        for attribute, score in value.items()
        if score is not None
    }
    if not scores:
        raise UserError(
            f"{name} has no score",
            code="row-scores-empty",
            fix='score at least one attribute, such as {"helpfulness": 3}, or remove the row',
        )
    return scores


def ids(value: object, name: str) -> Ids:
    """Token ids: a list of integers from 0, at least one."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    ):
        fix = "write a list of one or more integers, each at least 0"
        raise wrong_type(value, name, "a list of token ids", fix, "row-tokens-invalid")
    return Ids(tuple(value))


def logps(value: object, name: str) -> tuple[float, ...]:
    """Log-probabilities in nats, as a list."""
    if not isinstance(value, list) or not value:
        fix = f"write one log-probability per token of the completion, or remove {name}"
        raise wrong_type(value, name, "a list of log-probabilities", fix, "row-logps-invalid")
    numbers = tuple(number(item, f"number {n} of {name}") for n, item in enumerate(value, 1))
    if max(numbers) > 1e-3:
        raise UserError(
            f"{name} contains {max(numbers)}, but a log-probability is at most 0",
            code="row-logps-invalid",
            fix="write the natural logarithm of the probability of each token",
        )
    return numbers


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """An object, whatever is in it."""
    if not isinstance(value, Mapping):
        fix = f'write {name} as an object such as {{"key": "value"}}, or remove it'
        raise wrong_type(value, name, "an object", fix)
    return value


def parse_json(value: object) -> Any:
    """The value of JSON text; anything else as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def info(value: object, name: str) -> Mapping[str, Any]:
    """Metadata of a row: an object, also one written as JSON text.

    Any other value keeps the name of its column.
    """
    parsed = parse_json(value)
    return parsed if isinstance(parsed, dict) else {name: value}


def tools(value: object, name: str) -> tuple[Mapping[str, Any], ...]:
    """Descriptions of tools: a list of objects, or that list written as JSON text."""
    value = [] if isinstance(value, str) and not value.strip() else parse_json(value)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        fix = 'write a list such as [{"type": "function", "function": {"name": ...}}]'
        raise wrong_type(value, name, "a list of objects", fix)
    return tuple(value)


def turns(value: object, name: str, dialect: Dialect) -> tuple[Message, ...]:
    """Chat turns, at least one, each with one of the four roles."""
    if isinstance(value, str):
        text(value, name)
    if not isinstance(value, list) or not value:
        raise wrong_type(value, name, "a list of chat turns", f"write [{dialect.example}, ...]")
    return tuple(
        _turn(turn, f"turn {number} of {name}", dialect)
        for number, turn in enumerate(chain.from_iterable(map(_split_round, value)), 1)
    )


def _split_round(value: object) -> Sequence[object]:
    """The turns of a round, such as ``{"human": ..., "assistant": ...}``; a turn as it is."""
    if not isinstance(value, dict) or not value or not value.keys() <= ROUND.keys():
        return [value]
    order = list(ROUND)
    turns = sorted(value.items(), key=lambda turn: order.index(turn[0]))
    return [
        {"role": ROUND[name], "content": content} for name, content in turns if content is not None
    ]


def texts(value: object) -> list[str]:
    """A list of texts, also one that is written as JSON; empty for anything else."""
    if isinstance(value, str) and value.startswith("["):
        value = parse_json(value)
    if not isinstance(value, list) or not all(isinstance(item, str | None) for item in value):
        return []
    return [item or "" for item in value]


def as_turns(texts: Sequence[object]) -> Sequence[object]:
    """Texts that the user and the assistant wrote in turns, with their roles; turns as they are."""
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        return texts
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


MARKS = (r"### (Human|Assistant):", r"(?:\A\s*|\n\n)(Human|Assistant):")
"""What begins the turns of a transcript: in openassistant-guanaco, and in hh-rlhf."""
BEFORE_ANSWER = re.compile(r".*(?:### |\n\n)Assistant:", re.DOTALL)
"""A transcript up to its last answer."""


def transcript(text: str) -> tuple[tuple[Message, ...], int]:
    """The turns before the last answer of a transcript, and where this answer begins; no turns and
    0 for other text.

    A transcript begins with ``### Human:`` or ``Human:``, and its turns alternate.
    """
    for mark in MARKS:
        start, *parts = re.split(mark, text)
        roles, contents = parts[::2], parts[1::2]
        is_alternating = roles == ["Human", "Assistant"] * (len(roles) // 2)
        if roles and is_alternating and not start.strip():
            pairs = zip(roles[:-1], contents[:-1], strict=True)
            turns = ({"role": ROLES[who.lower()], "content": part.strip()} for who, part in pairs)
            return tuple(turns), len(text) - len(contents[-1])
    return (), 0


def _turn(value: object, name: str, dialect: Dialect) -> Message:
    if not isinstance(value, dict):
        raise wrong_type(value, name, "a chat turn", f"write {dialect.example}")
    dialect = dialect_of(value) or dialect
    name_of_role, content = value.get(dialect.role), value.get(dialect.content)
    if name_of_role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _tool_calls(content, name)}
    role = dialect.roles.get(name_of_role) if isinstance(name_of_role, str) else None
    if role is None:
        raise UserError(
            f"{name} has no {dialect.role}"
            if name_of_role is None
            else f"{name} has the unknown {dialect.role} {shown(name_of_role)}",
            code="row-role-invalid",
            fix=f"write the turn as {dialect.example}; {dialect.role} can be one of "
            f"{', '.join(dialect.roles)}",
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
            f"{name} has no {dialect.content}"
            if content is None
            else f"{dialect.content} of {name} is {shown(content)}, but must be text",
            code="row-content-invalid",
            fix=f"set {dialect.content} to a string",
        )
    turn_weight = rest.pop("weight", 1)
    if isinstance(turn_weight, bool) or turn_weight not in (0, 1):
        fix = (
            "write 0 to exclude the turn from training or 1 to include it; to weight the whole "
            "row, add a column `weight` to the row"
        )
        raise wrong_type(turn_weight, f"weight of {name}", "0 or 1", fix, "row-weight-invalid")
    ignored = {"weight": 0} if role == "assistant" and turn_weight == 0 else {}
    return {"role": role, "content": content, **rest, **ignored}


def _tool_calls(value: object, name: str) -> list[dict[str, Any]]:
    """The calls in a ShareGPT turn: JSON of an object with name and arguments, or of a list."""
    value = parse_json(value)
    calls = cast(list[object], value if isinstance(value, list) else [value])
    if not calls or not all(isinstance(call, dict) and call.get("name") for call in calls):
        fix = 'write {"name": ..., "arguments": {...}} as JSON'
        raise wrong_type(value, name, "a function call", fix)
    return [{"type": "function", "function": call} for call in calls]


def dialect_of(value: object) -> Dialect | None:
    """The dialect whose role and content this turn has; None for anything else."""
    names = value.keys() if isinstance(value, Mapping) else ()
    dialects = (OPENAI, SHAREGPT, COLOSSAL)
    return next((d for d in dialects if d.role in names and d.content in names), None)


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
        text_of = part.get("text", part.get("value")) if isinstance(part, dict) else part
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind is not None and kind not in TEXT_PARTS:
            raise UserError(
                f"part {number} of {name} has type {shown(kind)}, but Valence trains only on text",
                code="row-content-parts",
                fix="remove the row, or replace this part with text",
            )
        if not isinstance(text_of, str):
            raise UserError(
                f"part {number} of {name} has no text",
                code="row-content-parts",
                fix='write the part as {"type": "text", "text": "..."}',
            )
        texts.append(text_of)
    return "\n".join(texts)


def prompt(value: object, name: str, dialect: Dialect) -> TextOrTurns:
    """A prompt as text, or as turns of which the last is to be answered."""
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list):
        raise UserError(
            f"{name} is an object, but must be text or a list of chat turns; the turns are in "
            f"{name}.messages",
            code="row-nested-messages",
            fix=f"set keys: {{prompt: {name}.messages}} on this file in the recipe",
        )
    content = text_or_turns(value, name, dialect)
    if not content:
        raise UserError(
            f"{name} is empty", code="row-prompt-empty", fix="write the prompt, or remove the row"
        )
    return content if isinstance(content, str) else check_prompt(content, name)


def check_prompt(messages: Sequence[Message], name: str) -> tuple[Message, ...]:
    """The turns, when an answer can follow them: they end with a user or tool turn."""
    role = messages[-1]["role"] if messages else None
    if role not in ("user", "tool"):
        raise UserError(
            f"the prompt ({name}) ends with a turn of role {role}, not with a user or tool turn"
            if messages
            else f"{name} has no turn before the answer",
            code="row-prompt-end",
            fix="end the prompt with the user or tool turn that the assistant answers, or remove "
            "the row",
        )
    return tuple(messages)


def text_or_turns(value: object, name: str, dialect: Dialect) -> TextOrTurns:
    """Text, or the turns of a list. One turn may stand without its list."""
    if is_parts(value):
        value = parts_as_text(cast(list[object], value), name)
    if isinstance(value, str):
        return text(value, name)
    if not isinstance(value, dict | list):
        fix = f"write {name} as text in double quotes, or as [{dialect.example}, ...]"
        raise wrong_type(value, name, "text or a list of chat turns", fix)
    return turns([value] if isinstance(value, dict) else value, name, dialect)


def text(value: object, name: str) -> str:
    """Text that is not a list of chat turns in disguise, as a csv would have it."""
    if not isinstance(value, str):
        raise wrong_type(value, name, "a string", f"write {name} as a string in double quotes")
    if CHAT_AS_TEXT.match(value):
        raise UserError(
            f"{name} is a list of chat turns written as text",
            code="row-turns-as-text",
            fix="store the list itself, without quotes around it, in jsonl or parquet; a csv file "
            "cannot hold chat turns",
        )
    return value


def exchange(
    prompt: TextOrTurns,
    answers: Mapping[str, TextOrTurns],
    offered: tuple[Mapping[str, Any], ...],
) -> tuple[str | Chat, tuple[str | Chat, ...]]:
    """A prompt with its answers (by the name of their column), as text if all of it is text, else
    as chat.

    In a chat, a text prompt is a user turn, a text answer an assistant turn, and a prompt repeated
    in answers is cut.
    """
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers.values()):
        opening, end = transcript(prompt)
        if opening and not prompt[end:].strip():
            written = None if offered else prompt
            texts = {name: str(a).removeprefix(prompt) for name, a in answers.items()}
            return Chat(opening, offered, written), tuple(
                Chat(
                    ({"role": "assistant", "content": _check_not_empty(a, name).strip()},),
                    transcript=a if written else None,
                )
                for name, a in texts.items()
            )
        if offered:
            raise UserError(
                "the row has tools, but its prompt is text",
                code="row-tools-without-turns",
                fix='write the prompt as chat turns, such as [{"role": "user", "content": "..."}], '
                "or remove the tools",
            )
        return prompt, tuple(_check_not_empty(str(a), name) for name, a in answers.items())
    opening = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    sides = [
        ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer
        for answer in answers.values()
    ]
    sides = [side[len(opening) :] if side[: len(opening)] == opening else side for side in sides]
    if len(sides) == 2:  # which may go on together
        num_shared = _num_shared(*sides)
        opening += sides[0][:num_shared]
        sides = [side[num_shared:] for side in sides]
    checked = [check_answer(side, name) for side, name in zip(sides, answers, strict=True)]
    return Chat(opening, offered), tuple(map(Chat, checked))


def _num_shared(first: Sequence[Message], second: Sequence[Message]) -> int:
    """How many turns two conversations share, up to a user or tool turn."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    ends = (n for n, (turn, _) in enumerate(shared, 1) if turn["role"] in ("user", "tool"))
    return max(ends, default=0)


def first_rounds(conversation: object, num_rounds: int) -> object:
    """A conversation up to the answer after its user turn of this number."""
    if not isinstance(conversation, list):
        return conversation
    users = [i for i, turn in enumerate(conversation) if _is_by_user(turn)]
    return conversation[: users[num_rounds]] if len(users) > num_rounds else conversation


def _is_by_user(turn: Any) -> bool:
    dialect = dialect_of(turn)
    return dialect is not None and dialect.roles.get(str(turn[dialect.role])) == "user"


def _check_not_empty(text: str, name: str) -> str:
    if not text.strip():
        raise UserError(
            f"{name} is empty",
            code="row-completion-empty",
            fix="write the answer, or remove the row",
        )
    return text


def check_answer(messages: Sequence[Message], name: str) -> tuple[Message, ...]:
    """The turns, when they are an answer: the assistant's, with tool results between, none of them
    empty.
    """
    for turn in messages:
        if turn["role"] == "assistant" and not turn.get("tool_calls"):
            _check_not_empty(turn["content"], name)
    roles = [turn["role"] for turn in messages]
    if wrong := next((role for role in roles if role not in ("assistant", "tool")), None):
        raise UserError(
            f"{name} has a {wrong} turn that is not part of the prompt",
            code="row-completion-turns",
            fix=f"move the turns up to the last {wrong} turn into the prompt, or remove the turns "
            f"after the first answer; if {name} repeats the prompt, repeat it exactly",
        )
    if not roles or (roles[0], roles[-1]) != ("assistant", "assistant"):
        raise UserError(
            f"{name} does not begin and end with an assistant turn",
            code="row-completion-not-assistant",
            fix="put earlier turns into the prompt, and remove turns after the last assistant turn",
        )
    if all(turn.get("weight") == 0 for turn in messages if turn["role"] == "assistant"):
        raise UserError(
            f"all assistant turns of {name} have weight 0, so nothing is trained on",
            code="row-weight-zero",
            fix="remove the row, or set the weight of a turn to 1",
        )
    return tuple(messages)


GRADED = {
    "text": ("response", "answer", "completion", "text", "content", "output", "generation"),
    "score": ("overall_score", "score", "rating", "reward", "pm_score"),
    "rank": ("rank",),
}
"""Parts of an answer that is an object, and the names that they may have there."""


def graded(value: object) -> dict[str, Any]:
    """The text of an answer, and its score or its rank if it is an object that holds them."""
    if not isinstance(value, dict) or dialect_of(value):
        return {"text": value}
    return {
        part: value[names[0]]
        for part, others in GRADED.items()
        if (names := [name for name in others if value.get(name) is not None])
    }


def verdict(value: object, columns: Sequence[str], models: Sequence[object]) -> int | None:
    """-1 or 1 for the first or the second of two answers, the better one; 0 for a tie, and None for
    any other value.

    columns: of the answers; a verdict is one of these names, or the word in which they differ.
    models: the names of the models that wrote them, which may be the verdict too.
    """
    number = as_number(value)
    word = f"{number:g}" if number is not None else str(value).strip().casefold()
    if word in TIES:
        return 0
    names = [re.findall(r"[a-z]+|\d+", column.casefold()) for column in columns]
    marks = next(((a, b) for a, b in zip(*names, strict=False) if a != b), columns)
    *before, last = re.findall(r"[a-z]+|\d+|.", word) or [""]
    is_name = not before or (len(before) < 3 and before[0] in VERDICT_PREFIXES)
    for side, place in enumerate((FIRST, SECOND)):
        is_model = str(models[side]).casefold() == word and models[0] != models[1]
        is_column = (is_name and last == marks[side]) or word == columns[side].casefold()
        if is_model or is_column or word in place:
            return (-1, 1)[side]
    return None


def split_shared_prompt(
    sides: Mapping[str, object], dialect: Dialect
) -> tuple[TextOrTurns, Mapping[str, TextOrTurns]]:
    """The prompt that two whole conversations (by column) begin with, and their answers.

    Text is split before its last ``Assistant:`` answer.
    """
    texts = {name: side for name, side in sides.items() if isinstance(side, str)}
    if len(texts) == len(sides):
        beginning, fix = "text up to their last Assistant: turn", "add a column `prompt`"
        first, second = map(BEFORE_ANSWER.match, texts.values())
        shared = first[0] if first and second and first[0] == second[0] else ""
        answers = {name: text.removeprefix(shared) for name, text in texts.items()}
    else:
        beginning, fix = "user turn", "add a column `prompt`, or begin both with the same turns"
        answers = {name: turns(side, name, dialect) for name, side in sides.items()}
        first, second = answers.values()
        shared = first[: _num_shared(first, second)]
    if not shared:
        raise UserError(
            "the row has no prompt, and chosen and rejected do not begin with the same "
            f"{beginning}",
            code="row-prompt-not-shared",
            fix=fix,
        )
    return shared, answers


def wrong_type(
    value: object, name: str, expected: str, fix: str, code: str = "row-value-type"
) -> UserError:
    return UserError(f"{name} is {shown(value)}, but must be {expected}", code=code, fix=fix)


def shown(value: object) -> str:
    """A value as a message can show it: short."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
