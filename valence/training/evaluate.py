"""Evaluate a policy on held-out rows.

The whole set counts as one step, so that no number depends on micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isnan
from typing import Any

from transformers import PreTrainedTokenizerBase

from valence.data.sampler import canonical_order
from valence.distributed.process_group import Group, gather_objects
from valence.training.metrics import Meter
from valence.training.step import Objective, SequenceResult, final_out_of_memory
from valence.types import (
    Chat,
    Completion,
    Content,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Mean,
    Message,
    MicroBatch,
    Preference,
    Ranking,
    TokenizedExample,
)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    metrics: over all rows, by name, without a prefix such as ``eval/``. rows: the values of each
    row, in the order of the data.
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
    """Compute loss and metrics of the policy on these examples, without gradient.

    All processes of the objective's group call it. KTO has one z0 for all examples (or per group).
    """
    order = canonical_order(units, 0, 0)
    policy = objective.policy.eval()
    try:
        with final_out_of_memory(objective.has_collectives):
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


def all_rows(group: Group, local_rows: Sequence[SequenceResult]) -> list[SequenceResult]:
    """The results of all processes."""
    if group.size == 1:
        return list(local_rows)
    gathered_rows = gather_objects(group, [astuple(row) for row in local_rows])
    return [SequenceResult(*row) for rows in gathered_rows for row in rows]


def _row(
    unit: TokenizedExample,
    measured: Sequence[SequenceResult],
    example: Example | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """One row of an evaluation file: origin, label or scores, measured values, and text."""
    row: dict[str, Any] = {
        "id": unit.id,
        "origin": str(unit.origin),
        **({"source": unit.source} if unit.source else {}),
    }
    if unit.label is not None:
        row["label"] = unit.label
    elif unit.scores:
        # NaN: an attribute that the row lacks
        scores = [None if isnan(score) else score for score in unit.scores]
        row["target"] = scores[0] if len(scores) == 1 else scores
    names = {1: ("",), 2: ("_chosen", "_rejected")}.get(
        len(measured) if unit.kind != "ranking" else 0
    )
    for name, side in zip(names or [f"_{n}" for n in range(len(measured))], measured, strict=True):
        numbers = {
            "reward": side.reward,
            "scores": list(side.scores) or None,
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
            if isinstance(example, Judgement) and example.feedback:
                shown["feedback"] = example.feedback
        case Preference():
            shown |= {
                "chosen": as_text(example.chosen, tokenizer),
                "rejected": as_text(example.rejected, tokenizer),
            }
        case Ranking():
            shown |= {
                f"completion_{n}": as_text(completion, tokenizer)
                for n, completion in enumerate(example.completions)
            }
        case _:
            pass
    return shown


def as_text(content: Content, tokenizer: PreTrainedTokenizerBase) -> str:
    """Content as readable text: a message, a conversation with its roles, or decoded tokens.

    Tokens may be of another tokenizer, so their text is preferred.
    """
    if isinstance(content, Ids):
        if content.readable is None:
            return str(tokenizer.decode(list(content.ids)))
        content = content.readable
    if isinstance(content, str):
        return content
    return _conversation(content)


def answer_text(completion: Completion) -> str:
    """A completion as readable text: its only turn, or all of its turns with their roles."""
    if completion.episode is None or len(completion.episode.messages) < 2:
        return completion.text
    return _conversation(Chat(completion.episode.messages))


def _conversation(chat: Chat) -> str:
    texts = [_turn_text(message) for message in chat.messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{m['role']}: {text}" for m, text in zip(chat.messages, texts, strict=True))


def _turn_text(message: Message) -> str:
    """The content of a turn, and its tool calls as ``name({...})``."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    parts = [str(message.get("content") or "")]
    for call in calls:
        arguments = call.get("arguments", "")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"{call.get('name')}({shown})")
    return "\n".join(part for part in parts if part)
