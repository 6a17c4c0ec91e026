"""Models and rows of all cases: a tiny random model with random rows, and a real model with real
rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.parity.cases import ROWS
from examples.demo import assets
from valence.config.load import load_recipe
from valence.models.build import load_model
from valence.training.prepare import prepare
from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample

VOCABULARY, EOS = 512, 2
MAX_LENGTH = 160
"""Longest real prompt with its answer (tokens)."""


@dataclass(frozen=True)
class Inputs:
    """Folders of two different models, and tokenized rows whose answers end with ``eos``."""

    name: str
    first: Path
    second: Path
    judgements: tuple[TokenizedExample, ...]
    preferences: tuple[TokenizedExample, ...]
    eos: int

    def rows(self, kind: Kind) -> tuple[TokenizedExample, ...]:
        """The rows, converted to a kind."""
        if kind == "demonstration":
            return tuple(replace(unit, kind=kind, label=None) for unit in self.judgements)
        if kind == "ranking":
            return _ranked(self.preferences)
        if kind == "feedback":
            return _with_feedback(self.judgements)
        return self.preferences if kind == "preference" else self.judgements


def as_kind(rows: Sequence[TokenizedExample], kind: Kind) -> tuple[TokenizedExample, ...]:
    """Convert pairs: to two judgements each, or to a demonstration of the chosen side."""
    if rows[0].kind == kind:
        return tuple(rows)
    sides = (True,) if kind == "demonstration" else (True, False)
    return tuple(
        replace(
            row,
            id=f"{row.id} {up}",
            kind=kind,
            answers=(answer,),
            label=None if kind == "demonstration" else up,
        )
        for row in rows
        for up, answer in zip(sides, row.answers, strict=False)
    )


def shortened(rows: Sequence[TokenizedExample]) -> tuple[TokenizedExample, ...]:
    """The rows with prompts that are shortened to their last token."""
    return tuple(
        replace(row, prompt_ids=row.prompt_ids[-1:], prompt_mask=row.prompt_mask[-1:])
        for row in rows
    )


def _with_feedback(rows: Sequence[TokenizedExample]) -> tuple[TokenizedExample, ...]:
    """The rows with a teacher that reads the next row's answer after the prompt."""
    return tuple(
        replace(
            row,
            kind="feedback",
            label=None,
            teacher_ids=(*row.prompt_ids, *other.answers[0].ids[:-1]),
        )
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    )


def _ranked(pairs: Sequence[TokenizedExample]) -> tuple[TokenizedExample, ...]:
    """Three answers with random scores per prompt: those of its pair, and the next pair's first."""
    rng = random.Random(2)
    return tuple(
        replace(
            row,
            kind="ranking",
            answers=(*row.answers, other.answers[0]),
            scores=tuple(rng.gauss(0, 1) for _ in range(3)),
        )
        for row, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True)
    )


def tiny_inputs(folder: Path) -> Inputs:
    """A random Llama with two layers, and random rows of uneven lengths."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            # attention of fresh weights is nearly uniform, so that errors of it would not show
            weights.mul_(3 if weights.ndim > 1 else 1)
    first, second = _save_two(model, folder, noise=1.0)
    rng = random.Random(1)  # mismatched completions of this draw are cut at the longest row
    judgements = tuple(
        _random_row(f"judgement {i}", "judgement", rng, sides=1, label=i % 3 != 0)
        for i in range(ROWS)
    )
    preferences = tuple(_random_row(f"pair {i}", "preference", rng, sides=2) for i in range(ROWS))
    return Inputs("tiny random Llama, random rows", first, second, judgements, preferences, EOS)


def real_inputs(folder: Path) -> Inputs:
    """SmolLM2-135M-Instruct on rows of kto_en_demo and dpo_en_demo, encoded with its chat
    template.
    """
    source, data = assets.smollm2(), assets.llamafactory_data()
    judgements, preferences = _encoded("kto", source, data), _encoded("dpo", source, data)
    ups, downs = (
        [unit for unit in judgements if unit.label is label][: ROWS // 2] for label in (True, False)
    )
    alternating = tuple(unit for both in zip(ups, downs, strict=True) for unit in both)
    model = load_model(str(source), dtype=torch.float32)
    first, second = _save_two(model, folder, noise=0.04)
    eos = alternating[0].answers[0].ids[-1]
    return Inputs(
        "SmolLM2-135M-Instruct, rows of the real sets",
        first,
        second,
        alternating,
        preferences[:ROWS],
        eos,
    )


def _encoded(method: str, model: Path, folder: Path) -> tuple[TokenizedExample, ...]:
    """The rows of {method}_en_demo that fit MAX_LENGTH, the shortest first."""
    data = {"train": [{"path": str(folder / f"{method}_en_demo.json")}], "max_length": MAX_LENGTH}
    recipe = load_recipe(
        {"method": method, "model": {"name": str(model), "dtype": "float32"}, "data": data},
    )
    return tuple(sorted(prepare(recipe).corpora["train"].units, key=lambda unit: unit.tokens))


def _save_two(model: nn.Module, folder: Path, noise: float) -> tuple[Path, Path]:
    """Save a model and a copy with noise on the matrices. noise: relative to each matrix's standard
    deviation.
    """
    paths = folder / "first", folder / "second"
    model.save_pretrained(paths[0])  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    model.save_pretrained(paths[1])  # type: ignore[operator]
    return paths


def _random_row(
    name: str, kind: Kind, rng: random.Random, *, sides: int, label: bool | None = None
) -> TokenizedExample:
    """A row of random tokens with ``sides`` answers."""

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high)))

    prompt = ids(2, 40)
    texts = [(*ids(1, 40), EOS) for _ in range(sides)]
    return TokenizedExample(
        id=name,
        origin=Origin("made", 1),
        kind=kind,
        prompt_ids=prompt,
        prompt_mask=(False,) * len(prompt),
        answers=tuple(TokenizedCompletion(text, (True,) * len(text)) for text in texts),
        label=label,
    )
