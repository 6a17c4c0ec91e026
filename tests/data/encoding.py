"""Common parts of the tests of encoding: rows of chat and text, and an encoder with its results."""

from __future__ import annotations

from typing import Any

from tests.tiny import CHATML, tiny_tokenizer
from valence.data.audit_text import REMARKS, WARNINGS
from valence.data.encode import Encoder, Unusable
from valence.types import Chat, Content, Judgement, Origin, TokenizedCompletion, TokenizedExample

HERE = Origin("rows.jsonl", 1)


def turn(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*contents: str, first: str = "user") -> Chat:
    """Turns that alternate between user and assistant."""
    other = {"user": "assistant", "assistant": "user"}
    return Chat(
        tuple(turn(first if i % 2 == 0 else other[first], c) for i, c in enumerate(contents))
    )


def answered(prompt: Content, completion: Content) -> Judgement:
    return Judgement(prompt=prompt, completion=completion, label=True, origin=HERE)


def encoder(
    template: str | None = CHATML, *, max_length: int = 1000, tokenizer: Any = None, **options: Any
) -> Encoder:
    return Encoder(tokenizer or tiny_tokenizer(template), max_length=max_length, **options)


def encoded(enc: Encoder, example: Any) -> TokenizedExample:
    unit = enc.encode(example)
    assert isinstance(unit, TokenizedExample), unit
    return unit


def bad(enc: Encoder, example: Any, kind: str) -> Unusable:
    result = enc.encode(example)
    assert isinstance(result, Unusable), result
    assert (result.kind, result.dropped) == (kind, False)
    assert result.origin == example.origin
    assert result.reason
    assert result.fix
    return result


def notes(enc: Encoder, *examples: Any) -> dict[str, int]:
    """Number of rows with each note. The audit must have a sentence for every note."""
    counts = {name: len(rows) for name, rows in enc.encode_all(examples).notes.items()}
    assert counts.keys() <= {*WARNINGS, *REMARKS}
    return counts


def trained(enc: Encoder, answer: TokenizedCompletion) -> str:
    return text(enc, tuple(i for i, m in zip(answer.ids, answer.mask, strict=True) if m))


def text(enc: Encoder, ids: tuple[int, ...]) -> str:
    return str(enc.tokenizer.decode(list(ids)))
