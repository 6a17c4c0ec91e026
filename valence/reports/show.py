"""Show one row as it is in its file, as an example, and as tokens, for rich to print."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from valence.terminal import escape_control
from valence.types import (
    Chat,
    Content,
    Example,
    Ids,
    Origin,
    TokenizedCompletion,
    TokenizedExample,
    noun,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT, TRAINED, CONTEXT, SPECIAL = "dim", "green", "yellow", "reverse"
_LONGEST_CHARACTER = 4  # tokens: one for each byte of UTF-8
_WEAK, _STRONG = 0.05, 1.0
"""Nats below which a token's signal has no colour, and from which it is bold."""
_BAR_UNIT, _LONGEST_BAR = 0.25, 20
_SIDES = ("chosen", "rejected")
_BLANKS = str.maketrans({" ": "·", "\t": "→", "\n": "⏎\n"})


def show_row(row: Mapping[str, Any], origin: Origin | None = None) -> RenderableType:
    """Stage "row": every column as read, with its type."""
    table = _table("column", "type", "value")
    for name, value in row.items():
        text = (
            value
            if isinstance(value, str)
            else json.dumps(value, ensure_ascii=False, indent=2, default=str)
        )
        table.add_row(_plain(name), type(value).__name__, _plain(text))
    return Group(_heading("row", origin), table)


def show_example(example: Example) -> RenderableType:
    """Stage "example": the parsed row, with a line for each turn of each part."""
    table = _table("part", "role", "content")
    facts: dict[str, object] = {}
    for name in type(example).__dataclass_fields__:
        value = getattr(example, name)
        if name == "error" and not value:
            continue
        if name == "feedback" and not value:
            continue
        if isinstance(value, str | Chat | Ids):
            _add_content(table, name, value)
        elif name == "completions":
            for index, completion in enumerate(value):
                _add_content(table, f"completion {index}", completion)
        elif name != "origin":
            facts[name] = value
    kind = type(example).__name__.lower()
    return Group(_heading(noun(kind), example.origin), table, _facts({**facts, "id": example.id}))


def show_encoded(encoded: TokenizedExample, tokenizer: PreTrainedTokenizerBase) -> RenderableType:
    """Stage "tokens": prompt and answers as coloured tokens, with counts, ids and a legend."""
    parts: list[RenderableType] = [
        _heading(f"{noun(encoded.kind)}, {encoded.tokens} tokens", encoded.origin),
        _legend(),
    ]
    prompt = TokenizedCompletion(ids=encoded.prompt_ids, mask=encoded.prompt_mask)
    parts += _tokens("prompt", prompt, PROMPT, tokenizer)
    if encoded.teacher_ids:
        parts += _tokens(
            "prompt of the teacher", _untrained(encoded.teacher_ids), PROMPT, tokenizer
        )
    names = _SIDES if encoded.kind == "preference" else ("answer",)
    if encoded.kind == "ranking":
        names = tuple(f"answer {index}" for index in range(len(encoded.answers)))
    for name, answer in zip(names, encoded.answers, strict=False):
        parts += _tokens(name, answer, CONTEXT, tokenizer)
    facts = {
        "label": encoded.label,
        "scores": list(encoded.scores),
        "margin": encoded.margin,
        "weight": encoded.weight,
        "source": encoded.source,
        "id": encoded.id,
    }
    return Group(*parts, _facts(facts))


def show_signals(
    encoded: TokenizedExample, signals: Sequence[float], tokenizer: PreTrainedTokenizerBase
) -> RenderableType:
    """The answer with each trained token coloured by its signal, and a table of the signals.

    signals: log p_teacher - log p_policy of each trained token (nats).
    """
    [answer] = encoded.answers
    text, table = Text(overflow="fold"), _table("signal", "", "token")
    table.columns[0].justify = "right"
    for piece in signal_pieces(answer, tokenizer, signals):
        signal, words = piece["signal"], _plain(piece["text"]).plain.translate(_BLANKS)
        words = words or f"<id {piece['ids'][0]}>"
        text.append(words, PROMPT if signal is None else _signal_style(signal))
        if signal is not None:
            bar = ("+" if signal > 0 else "-") * min(_LONGEST_BAR, round(abs(signal) / _BAR_UNIT))
            table.add_row(f"{signal:+.2f}", bar, Text(words.rstrip("\n"), _signal_style(signal)))
    mean = f"mean {math.fsum(signals) / len(signals):+.3f} nats per token" if signals else "empty"
    return Group(
        _heading(f"signal of the teacher: {mean}", encoded.origin), _signal_legend(), text, table
    )


def signal_pieces(
    answer: TokenizedCompletion, tokenizer: PreTrainedTokenizerBase, signals: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """The tokens of an answer as plain data: ids, text, whether they are trained, and the sum of
    their signals (None without).
    """
    values = iter(signals)
    by_token = [next(values, None) if is_trained else None for is_trained in answer.mask]
    pieces_of: list[dict[str, Any]] = []
    for piece, words in pieces(answer, tokenizer):
        known = [signal for signal in by_token[piece] if signal is not None]
        pieces_of.append(
            {
                "ids": list(answer.ids[piece]),
                "text": words,
                "trained": answer.mask[piece.start],
                "signal": math.fsum(known) if known else None,
            }
        )
    return pieces_of


def encoded_as_json(
    encoded: TokenizedExample,
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    signals: Sequence[float] | None,
) -> dict[str, Any]:
    """What ``show_encoded`` and ``show_signals`` show, as plain data."""
    teacher = _decode(encoded.teacher_ids, tokenizer) if encoded.teacher_ids else None
    return {
        "id": encoded.id,
        "origin": str(encoded.origin),
        "prompt": _decode(encoded.prompt_ids, tokenizer),
        "teacher_prompt": teacher,
        "feedback": getattr(example, "feedback", "") or None,
        "signal": math.fsum(signals) / len(signals) if signals else None,
        "answers": [signal_pieces(a, tokenizer, signals or ()) for a in encoded.answers],
    }


def _signal_style(signal: float) -> str:
    if abs(signal) < _WEAK:
        return PROMPT
    colour = "green" if signal > 0 else "red"
    return f"bold {colour}" if abs(signal) >= _STRONG else colour


def _signal_legend() -> Text:
    return Text.assemble(
        "log p of the teacher minus log p of the policy, in nats:  ",
        ("less likely", "red"),
        "  ",
        ("more likely", "green"),
        f"  (bold from {_STRONG:g})  ",
        (f"below {_WEAK:g}", PROMPT),
    )


def _untrained(ids: Sequence[int]) -> TokenizedCompletion:
    return TokenizedCompletion(ids=tuple(ids), mask=(False,) * len(ids))


def _plain(text: object) -> Text:
    return Text(escape_control(str(text)))


def pieces(
    answer: TokenizedCompletion, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[slice, str]]:
    """The tokens with the text that each one adds.

    Tokens with parts of one character are grouped, unless only some of them are trained.
    """
    ids, mask = answer.ids, answer.mask
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        known = _decode(ids[before:start], tokenizer)
        text = _decode(ids[before:end], tokenizer)[len(known) :]
        alike = end < len(ids) and mask[end] == mask[start]
        if text.endswith("\ufffd") and end - start < _LONGEST_CHARACTER and alike:
            continue
        yield slice(start, end), text
        before, start = start, end


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **settings))


def _tokens(
    name: str, answer: TokenizedCompletion, style: str, tokenizer: PreTrainedTokenizerBase
) -> list[RenderableType]:
    """A rule with the counts, the tokens in colour (``style`` where not trained), and their ids."""
    cut = "" if answer.complete else ", cut off"
    title = f"{name}: {len(answer.ids)} tokens, {sum(answer.mask)} trained{cut}"
    text, special = Text(overflow="fold"), set(tokenizer.all_special_ids)
    for index, (piece, words) in enumerate(pieces(answer, tokenizer)):
        first = answer.ids[piece.start]
        look = [
            TRAINED if answer.mask[piece.start] else style,
            index % 2 and "underline",
            first in special and SPECIAL,
        ]
        text.append(
            _plain(words).plain.translate(_BLANKS) or f"<id {first}>", " ".join(filter(None, look))
        )
    ids = Text(" ".join(map(str, answer.ids)), style="dim")
    return [Rule(Text(title), align="left", characters="-"), text, ids]


def _legend() -> Text:
    return Text.assemble(
        ("prompt", PROMPT),
        "  ",
        ("trained", TRAINED),
        "  ",
        ("answer, not trained", CONTEXT),
        "  ",
        ("special", SPECIAL),
        "  · blank  → tab  ⏎ line end  every second token underlined",
    )


def _add_content(table: Table, part: str, content: Content) -> None:
    if isinstance(content, str):
        table.add_row(part, "text", _plain(content))
    elif isinstance(content, Ids):
        table.add_row(part, "ids", Text(" ".join(map(str, content.ids))))
    else:
        for message in content.messages:
            table.add_row(part, _plain(message.get("role")), _plain(_content(message)))
        for tool in content.tools:
            table.add_row(part, "tool", _plain(json.dumps(tool, ensure_ascii=False, default=str)))


def _content(message: Mapping[str, Any]) -> str:
    """The content of a turn, followed by its other fields as JSON."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    content = message.get("content")
    text = (
        content
        if isinstance(content, str)
        else json.dumps(content, ensure_ascii=False, default=str)
    )
    return f"{text}\n{json.dumps(rest, ensure_ascii=False, default=str)}" if rest else text


def _facts(facts: Mapping[str, object]) -> Text:
    known = {
        name: value
        for name, value in facts.items()
        if value is not None and value not in ([], {}, "")
    }
    return _plain("  ".join(f"{name}={value}" for name, value in known.items()))


def _heading(title: str, origin: Origin | None) -> Rule:
    return Rule(_plain(f"{title}  {origin}" if origin else title), align="left", characters="=")


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
