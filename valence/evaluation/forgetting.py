"""Forgetting: how much worse a model predicts other texts than the model that it started from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from valence.data.load import DataFile, stream
from valence.data.sources import BadRow
from valence.errors import UserError
from valence.statistics import student_interval
from valence.types import Demonstration, Example, Judgement, Origin, Preference, Ranking

SHIPPED = "shipped"
"""Name of the texts that come with Valence, in place of a file."""


class TextLoss(NamedTuple):
    """The negative log-likelihood of a text in nats, and the size of the text."""

    nats: float
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class TextLosses:
    """The losses of texts under a model, by the content ids of the texts.

    vocabulary: digest of the tokenizer's.
    """

    vocabulary: str
    texts: Mapping[str, TextLoss]

    def to_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "texts": {id: [*x] for id, x in self.texts.items()}}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> TextLosses:
        """Read the result of ``to_dict``. Raises KeyError, TypeError or AttributeError for anything
        else.
        """
        return cls(value["vocabulary"], {id: TextLoss(*x) for id, x in value["texts"].items()})


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Losses of the same texts before and after training.

    before, after: mean negative log-likelihood in nats per ``unit``. low, high: the 95 % interval
    of the difference over texts; None for one text. unit: byte if the tokenizers differ.
    """

    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    unit: Literal["token", "byte"]
    num_texts: int

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity after training divided by that before."""
        return math.exp(min(self.difference, 700.0))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity_ratio": self.perplexity_ratio}


def measure_forgetting(before: TextLosses, after: TextLosses) -> Forgetting:
    """Compare the losses of the texts that both models have read.

    With the difference d_i of the losses of text i and its size n_i, the difference is
    D = sum(d_i) / sum(n_i). Its interval is Student's t of D + (d_i - D n_i) / mean(n), the
    linearization of this ratio (Cochran 1977, section 2.11).

    Raises UserError without common texts.
    """
    pairs = [(before.texts[id], after.texts[id]) for id in before.texts if id in after.texts]
    if not pairs:
        raise UserError(
            "both models have no text in common",
            code="no-usable-rows",
            where="other texts",
            fix="measure both on the same file of texts, none of them too long",
        )
    has_same_tokens = before.vocabulary == after.vocabulary and all(
        first.num_tokens == second.num_tokens for first, second in pairs
    )
    sizes = [first.num_tokens if has_same_tokens else first.num_bytes for first, _ in pairs]
    total, mean_size = sum(sizes), sum(sizes) / len(sizes)
    changes = [second.nats - first.nats for first, second in pairs]
    difference = math.fsum(changes) / total
    values = [
        difference + (change - difference * size) / mean_size
        for change, size in zip(changes, sizes, strict=True)
    ]
    low, high = student_interval(values) if len(values) > 1 else (None, None)
    return Forgetting(
        before=math.fsum(first.nats for first, _ in pairs) / total,
        after=math.fsum(second.nats for _, second in pairs) / total,
        difference=difference,
        low=low,
        high=high,
        unit="token" if has_same_tokens else "byte",
        num_texts=len(pairs),
    )


# Texts


def read_texts(path: str) -> list[Demonstration]:
    """The texts of a file, each once: rows of any format, or passages of plain text (.txt) that
    blank lines separate. ``SHIPPED``: those that come with Valence.

    The prompt of a row is context. A row with only a prompt is a plain text. The best of several
    completions is used. Raises UserError for a row that is not a text.
    """
    if path == SHIPPED:
        path = str(Path(__file__).with_name("other_text.jsonl"))
    texts = _passages(path) if path.lower().endswith(".txt") else _rows(path)
    by_id = {text.id: text for text in texts}
    if not by_id:
        raise UserError(
            "the file has no texts", code="file-empty", where=path, fix="use another file"
        )
    return list(by_id.values())


def _rows(path: str) -> Iterator[Demonstration]:
    for _, example in stream(DataFile(path)):
        if isinstance(example, BadRow):
            raise UserError(
                example.reason, code=example.code, where=str(example.origin), fix=example.fix
            )
        yield _text(example)


def _text(example: Example) -> Demonstration:
    prompt, origin = example.prompt, example.origin
    match example:
        case Demonstration():
            return replace(example, weight=1.0)
        case Judgement():
            completion = example.completion
        case Preference():
            completion = example.chosen
        case Ranking():
            best = max(range(len(example.scores)), key=lambda i: example.scores[i])
            completion = example.completions[best]
        case _:
            if not isinstance(prompt, str):
                raise UserError(
                    "the row has no text to predict, only the messages before it",
                    code="row-not-scorable",
                    where=str(origin),
                    fix="add an answer, or remove the row",
                )
            prompt, completion = "", prompt
    return Demonstration(prompt=prompt, completion=completion, origin=origin)


def _passages(path: str) -> Iterator[Demonstration]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror})",
            code="file-not-readable",
            where=path,
            fix="use a file of rows, or of plain text (.txt)",
        ) from error
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            "the line is not UTF-8",
            code="file-encoding",
            where=f"{path}:{line}",
            fix="save the file as UTF-8",
        ) from error
    for has_text, group in groupby(enumerate(lines, 1), key=lambda line: bool(line[1].strip())):
        if has_text:
            numbered = list(group)
            yield Demonstration(
                prompt="",
                completion="\n".join(line for _, line in numbered),
                origin=Origin(path, numbered[0][0]),
            )
