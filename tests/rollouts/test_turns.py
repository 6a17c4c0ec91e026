"""Turns that are sampled with the keys and values of earlier ones are those without them."""

from __future__ import annotations

import pytest
import torch

from tests.rollouts.test_continuous import KINDS, generator_of
from valence.rollouts import HFGenerator, Sampling
from valence.rollouts.hf import evaluating, uniforms
from valence.rollouts.turns import Conversation, TurnSampler

PROMPTS = (tuple(range(5, 8)), tuple(range(5, 8)), tuple(range(9, 20)), tuple(range(4, 44)))
SAMPLING = Sampling(max_new_tokens=40, temperature=0.9)
RESULTS = ((7, 9, 11), (30,), tuple(range(50, 63)), (8, 8))
"""What follows the turns of each conversation."""

Turns = list[tuple[int, list[int], list[float]]]
"""Tokens before a turn, and the turn's tokens and log-probabilities."""


def with_short_turns(kind: str) -> HFGenerator:
    """A generator with many end tokens. The library's eager attention computes padding in float32
    only, so that it is NaN in float64."""
    generator = generator_of(kind)
    if kind in ("bloom", "gemma2"):
        generator.model.float()  # type: ignore[no-untyped-call]
    generator.end_ids = list(range(0, len(generator.tokenizer), 12))
    return generator


def conversations() -> list[Conversation]:
    return [Conversation(list(p), uniforms(SAMPLING, 0, k)) for k, p in enumerate(PROMPTS)]


def sample_turns(generator: HFGenerator, started: list[list[int]], *, keep: bool) -> list[Turns]:
    """The turns of each conversation. started: those that take part in each wave."""
    items, turns = conversations(), [Turns() for _ in PROMPTS]
    sampler, open_turns = TurnSampler(generator, SAMPLING), set(range(len(items)))

    def on_turn(item: Conversation, tokens: list[int], logps: list[float]) -> None:
        k = items.index(item)
        turns[k].append((len(item.tokens) - len(tokens), tokens, logps))
        if not keep:
            item.saved = None
        if tokens[-1] in generator.end_ids:
            item.tokens += RESULTS[k]
        if len(item.tokens) - item.start >= SAMPLING.max_new_tokens:
            open_turns.discard(k)

    with torch.no_grad(), evaluating(generator.model):
        for wave in started:
            if chosen := [items[k] for k in wave if k in open_turns]:
                sampler.sample(chosen, on_turn, lambda: None)
    assert all(item.tokens for item in items)
    return turns


WAVES = [[0, 1, 3], [0, 1, 2, 3], [2, 3], [3, 1, 0, 2], [0, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_have_the_log_probabilities_of_the_whole_conversation(kind: str) -> None:
    """Prompts of several lengths, some of them equal; conversations that join later."""
    generator, items = with_short_turns(kind), conversations()
    turns = sample_turns(generator, WAVES, keep=True)
    assert sum(map(len, turns)) > 8
    for k, (item, sampled) in enumerate(zip(items, turns, strict=True)):
        tokens = list(item.tokens)
        for before, turn, logps in sampled:
            tokens += RESULTS[k] if before > len(tokens) else ()
            assert before == len(tokens)
            [expected] = generator.logps([(tokens, turn)], temperature=SAMPLING.temperature)
            assert logps == pytest.approx(expected, abs=1e-5)
            tokens += turn


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral-window"])
def test_kept_keys_and_values_change_nothing(kind: str) -> None:
    generator = with_short_turns(kind)
    with_cache, without_cache = (
        sample_turns(generator, WAVES, keep=keep) for keep in (True, False)
    )
    assert [[t for _, t, _ in turns] for turns in with_cache] == [
        [t for _, t, _ in turns] for turns in without_cache
    ]


def test_only_new_tokens_are_run() -> None:
    generator, lengths = with_short_turns("llama"), list[int]()
    forward = generator.forward

    def counting(tokens: torch.Tensor, *rest: object, **options: object) -> object:
        lengths.append(tokens.shape[1])
        return forward(tokens, *rest, **options)  # type: ignore[arg-type]

    generator.forward = counting  # type: ignore[method-assign,assignment]
    sample_turns(generator, [[3], [3], [3]], keep=True)
    assert lengths.count(len(PROMPTS[3])) == 1
    assert max(n for n in lengths if n != len(PROMPTS[3])) <= 1 + len(RESULTS[3])
