"""Completions that are sampled together have the tokens that they have alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.rollouts import HFGenerator, Sampling
from valence.rollouts.continuous import ContinuousBatch, RunningCompletion
from valence.rollouts.hf import evaluating, uniforms
from valence.types import Completion

KINDS = ("llama", "cohere", "gemma2", "mistral-window", "gpt2", "gpt_neox", "bloom")


def generator_of(kind: str) -> HFGenerator:
    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny(kind, vocab_size=len(tokenizer), dtype=torch.float64)
    return HFGenerator(model, tokenizer, end_ids=[0, 1, 2])


def completions(prompt: tuple[int, ...], samplings: Sequence[Sampling]) -> list[RunningCompletion]:
    return [RunningCompletion(prompt, s, uniforms(s, 0, 0)) for s in samplings]


def sample(
    generator: HFGenerator, arrivals: dict[int, list[tuple[tuple[int, ...], list[Sampling]]]]
) -> list[Completion]:
    """Sample until the end. arrivals: by step, the prompts that are added before it."""
    rows = list[RunningCompletion]()
    batch, step = ContinuousBatch(generator), 0
    waiting = {number: list(added) for number, added in arrivals.items()}
    with torch.no_grad(), evaluating(generator.model):
        while batch.rows or any(waiting.values()):
            for number, added in waiting.items():
                while number <= step and added and batch.can_add:
                    new = completions(*added.pop(0))
                    batch.add(new)
                    rows += new
            if batch.rows:
                batch.draw()
                batch.advance()
            step += 1
    return [batch.complete(row) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_the_same_alone_and_together(kind: str) -> None:
    generator = generator_of(kind)
    short, medium, long = tuple(range(5, 8)), tuple(range(9, 20)), tuple(range(4, 74))

    def samplings(*seeds: int) -> list[Sampling]:
        return [
            Sampling(
                seed=seed,
                max_new_tokens=3 + 17 * (seed % 5),
                temperature=(1.0, 0.0, 1.5)[seed % 3],
                top_p=(1.0, 0.8)[seed % 2],
            )
            for seed in seeds
        ]

    # a longer prompt joins shorter ones, a shorter one longer ones, and only short ones remain
    arrivals = {
        0: [(medium, samplings(1, 2, 4))],
        2: [(long, samplings(5, 3))],
        9: [(short, samplings(9)), (medium, samplings(6))],
        30: [(short, samplings(8))],
    }
    together = sample(generator, arrivals)
    expected = [
        generator.generate([prompt], 1, sampling)[0][0]
        for added in arrivals.values()
        for prompt, samplings_of_prompt in added
        for sampling in samplings_of_prompt
    ]
    assert [completion.tokens for completion in together] == [
        completion.tokens for completion in expected
    ]
    for mine, alone in zip(together, expected, strict=True):
        assert (mine.text, mine.stop, mine.prompt_id) == (alone.text, alone.stop, alone.prompt_id)
        assert mine.logps == pytest.approx(alone.logps, abs=1e-6)


def test_the_cache_is_not_longer_than_its_longest_row() -> None:
    generator = generator_of("llama")
    batch = ContinuousBatch(generator)
    with torch.no_grad():
        batch.add(completions(tuple(range(3, 90)), [Sampling(max_new_tokens=2)]))
        samplings = [Sampling(max_new_tokens=50, seed=seed) for seed in (1, 2)]
        batch.add(completions((5, 6), samplings))
        for _ in range(3):
            batch.draw()
            batch.advance()
        assert batch.rows
        lengths = {len(row.prompt) + len(row.tokens) for row in batch.rows}
        assert {layer.keys.shape[2] for layer in batch._cache.layers} == {max(lengths)}


def test_logits_that_are_not_finite_are_an_error() -> None:
    generator = generator_of("llama")
    head: Any = generator.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.fill_(float("nan"))
        batch = ContinuousBatch(generator)
        [row] = completions((5, 6), [Sampling()])
        batch.add([row])
        batch.draw()
    assert isinstance(row.error, FloatingPointError)
    assert row.is_finished
