"""Measuring a policy on held-out rows: the whole set counts as one step, so that no number depends
on how it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isnan
from typing import Any

from transformers import PreTrainedTokenizerBase

from valence.data.sampler import canonical_order
from valence.distributed.process_group import Group, gather_objects
from valence.reports.metrics import Meter
from valence.trainer.step import Objective, SequenceResult
from valence.types import (
    Chat,
    Content,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Mean,
    MicroBatch,
    Preference,
    Ranking,
    TokenizedExample,
)


@dataclass(frozen=True)
class Evaluation:
    """Metrics over all rows (names without a prefix), and what each row measured, in the order of
    the data.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def evaluate(
    objective: Objective,
    units: Sequence[TokenizedExample],
    examples: Mapping[str, Example],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[MicroBatch | None], None] = lambda _: None,
) -> Evaluation:
    """Loss and metrics of the policy on these units, without a gradient, on all processes of the
    objective's group together. kto has one z0 for all of them (or one per group).
    """
    order = canonical_order(units, 0, 0)
    policy = objective.policy.eval()
    try:
        outcome = objective.run(
            [units[i] for i in order], backward=False, rows=True, progress=progress
        )
    finally:
        policy.train()
    meter = Meter()
    meter.add({"loss": Mean(outcome.loss, outcome.loss.new_ones(()))})
    meter.pool(outcome.metrics)
    by_unit: dict[int, list[SequenceResult]] = {}
    for row in all_rows(objective.group, outcome.rows):
        by_unit.setdefault(order[row.unit], []).append(row)
    rows = [
        _row(unit, sorted(by_unit[i], key=lambda row: row.side), examples.get(unit.id), tokenizer)
        for i, unit in enumerate(units)
    ]
    return Evaluation(meter.reduce(objective.group), rows)


def all_rows(group: Group, own: Sequence[SequenceResult]) -> list[SequenceResult]:
    """What all processes measured."""
    found = gather_objects(group, [astuple(row) for row in own]) if group.size > 1 else []
    return [SequenceResult(*row) for rows in found for row in rows] if found else list(own)


def _row(
    unit: TokenizedExample,
    measured: Sequence[SequenceResult],
    example: Example | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """What is written about one row: where it is from, its verdict, what was measured, its text."""
    row: dict[str, Any] = {
        "id": unit.id,
        "origin": str(unit.origin),
        **({"source": unit.source} if unit.source else {}),
    }
    if unit.label is not None:
        row["label"] = unit.label
    elif unit.scores:
        # an attribute that the row lacks
        given = [None if isnan(score) else score for score in unit.scores]
        row["target"] = given[0] if len(given) == 1 else given
    names = {1: ("",), 2: ("_chosen", "_rejected")}.get(
        len(measured) if unit.kind != "ranking" else 0
    )
    for name, side in zip(names or [f"_{n}" for n in range(len(measured))], measured, strict=True):
        scores = list(side.scores) or None
        numbers = {
            "reward": side.reward,
            "scores": scores,
            "logp": side.logp,
            "ref": side.ref,
            "tokens": side.tokens,
        }
        row |= {f"{key}{name}": value for key, value in numbers.items() if value is not None}
    return row | ({} if example is None else texts(example, tokenizer))


def texts(example: Example, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The prompt and the completions of an example as text to read."""
    shown = {"prompt": as_text(example.prompt, tokenizer)}
    match example:
        case Judgement() | Demonstration():
            shown["completion"] = as_text(example.completion, tokenizer)
        case Preference():
            shown |= {
                "chosen": as_text(example.chosen, tokenizer),
                "rejected": as_text(example.rejected, tokenizer),
            }
        case Ranking():
            shown |= {
                f"completion_{n}": as_text(each, tokenizer)
                for n, each in enumerate(example.completions)
            }
        case _:
            pass
    return shown


def as_text(content: Content, tokenizer: PreTrainedTokenizerBase) -> str:
    """Content to read: the text itself, a single message's text, a conversation with its roles, or
    decoded tokens.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Ids):
        return str(tokenizer.decode(list(content.ids)))
    return _conversation(content)


def _conversation(chat: Chat) -> str:
    said = [m.get("content") or m.get("tool_calls") or "" for m in chat.messages]
    if len(said) == 1:
        return str(said[0])
    return "\n".join(f"{m['role']}: {text}" for m, text in zip(chat.messages, said, strict=True))
