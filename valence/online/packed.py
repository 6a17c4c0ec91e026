"""Pack completions and examples for a checkpoint: tokens and columns in one tensor each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from valence.types import Completion, Origin, TokenizedCompletion, TokenizedExample

PLAIN = ("id", "kind", "label", "scores", "attributes", "margin", "soft", "weight", "source")
"""Fields that are saved as they are."""


def packed(units: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Pack the tokens, columns and other fields of examples.

    Prompts are outside the loss mask; a completion is entirely inside or outside it.
    """
    answers = [answer for unit in units for answer in unit.answers]
    columns: dict[str, list[float]] = {}
    for answer in answers:
        for name, values in answer.columns:
            columns.setdefault(name, []).extend(values)
    return {
        "rows": [
            {name: getattr(unit, name) for name in PLAIN} | {"origin": asdict(unit.origin)}
            for unit in units
        ],
        "lengths": [
            [len(unit.prompt_ids), *(len(answer.ids) for answer in unit.answers)] for unit in units
        ],
        "complete": [answer.complete for answer in answers],
        "masked": [not any(answer.mask) for answer in answers],
        "tokens": torch.tensor(
            [
                i
                for unit in units
                for i in (*unit.prompt_ids, *(t for a in unit.answers for t in a.ids))
            ]
        ).long(),
        "columns": {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in sorted(columns.items())
        },
    }


def packed_completions(groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Pack what was sampled for each prompt."""
    flat = [completion for group in groups for completion in group]
    return {
        "groups": [len(group) for group in groups],
        "lengths": [len(completion.tokens) for completion in flat],
        "tokens": torch.tensor([t for completion in flat for t in completion.tokens]).long(),
        "logps": torch.tensor(
            [logp for completion in flat for logp in completion.logps], dtype=torch.float64
        ),
        "rest": [[c.text, c.stop, c.version, list(c.versions)] for c in flat],
    }


def unpacked_records(state: Mapping[str, Any]) -> list[list[list[Any]]]:
    """For each prompt, its completions: tokens, logps, text, stop, version and versions."""
    lengths = state["lengths"]
    tokens, logps = state["tokens"].split(lengths), state["logps"].split(lengths)
    records = iter(
        [t.tolist(), values.tolist(), *rest]
        for t, values, rest in zip(tokens, logps, state["rest"], strict=True)
    )
    return [[next(records) for _ in range(n)] for n in state["groups"]]


def unpacked(state: Mapping[str, Any]) -> list[TokenizedExample]:
    """Restore the examples that ``packed`` packed."""
    tokens = iter(state["tokens"].split([n for lengths in state["lengths"] for n in lengths]))
    complete = iter(state["complete"])
    masked = iter(state["masked"])
    sizes = [n for _, *lengths in state["lengths"] for n in lengths]
    columns = {name: iter(values.split(sizes)) for name, values in state["columns"].items()}
    examples: list[TokenizedExample] = []
    for row, (_, *lengths) in zip(state["rows"], state["lengths"], strict=True):
        prompt = tuple(next(tokens).tolist())
        answers = [
            TokenizedCompletion(
                tuple(next(tokens).tolist()),
                (not next(masked),) * n,
                next(complete),
                tuple((name, tuple(next(values).tolist())) for name, values in columns.items()),
            )
            for n in lengths
        ]
        plain = {name: row[name] for name in PLAIN} | {
            "scores": tuple(row["scores"]),
            "attributes": tuple((name, score) for name, score in row["attributes"]),
            "origin": Origin(**row["origin"]),
        }
        examples.append(
            TokenizedExample(
                **plain,
                prompt_ids=prompt,
                prompt_mask=(False,) * len(prompt),
                answers=tuple(answers),
            )
        )
    return examples
