"""Turns that are sampled with the keys and values of earlier ones are those without them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from tests.rollouts.test_continuous import KINDS, generator_of
from valence.rollouts import HFGenerator, Sampling
from valence.rollouts.continuous import ContinuousBatch, KeysValues, RunningCompletion
from valence.rollouts.hf import evaluating, uniforms

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


@dataclass
class Conversation:
    """tokens: so far. turns: of the policy."""

    number: int
    tokens: list[int]
    turns: Turns = field(default_factory=Turns)
    saved: KeysValues | None = None

    @property
    def num_new(self) -> int:
        return len(self.tokens) - len(PROMPTS[self.number])

    def next_turn(self) -> RunningCompletion:
        draws = uniforms(SAMPLING, 0, self.number)[self.num_new :]
        return RunningCompletion(tuple(self.tokens), SAMPLING, draws, self.saved)

    def add(self, row: RunningCompletion, ends: list[int]) -> None:
        self.turns.append((len(self.tokens), row.tokens, row.logps))
        self.tokens += row.tokens
        if row.tokens[-1] in ends:
            self.tokens += RESULTS[self.number]


def sample_turns(
    generator: HFGenerator, joining: list[list[int]], *, keep: bool
) -> list[Conversation]:
    """joining: the conversations whose next turn joins the others at each step, or as soon as it
    can. A conversation takes part once its turn before has ended."""
    items = [Conversation(k, list(prompt)) for k, prompt in enumerate(PROMPTS)]
    batch, running = ContinuousBatch(generator), dict[RunningCompletion, Conversation]()
    steps, waiting = iter(joining), list[int]()
    with torch.no_grad(), evaluating(generator.model):
        while (new := next(steps, None)) is not None or running or waiting:
            waiting += new or []
            busy = {item.number for item in running.values()}
            chosen = [items[k] for k in dict.fromkeys(waiting) if k not in busy]
            if batch.can_add and chosen:
                waiting = [k for k in waiting if k in busy]
                rows = {
                    item.next_turn(): item
                    for item in chosen
                    if item.num_new < SAMPLING.max_new_tokens
                }
                batch.add(list(rows))
                running.update(rows)
            if not batch.rows:
                continue
            batch.draw()
            for row in batch.rows:
                if row.is_finished:
                    item = running.pop(row)
                    item.saved = batch.save(row) if keep else None
                    item.add(row, generator.end_ids)
            batch.advance()
    return items


JOINING = [
    *([0, 1, 3], [], [2], [0], [], [0, 1, 2, 3], [], [], [2, 3], [], [3, 1, 0, 2], [], [0, 2]),
    *([], [], [1, 3, 0], [2], [], [3], [0, 1, 2], [], [3, 2], [1], [0]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_have_the_log_probabilities_of_the_whole_conversation(kind: str) -> None:
    """Prompts of several lengths, some of them equal; conversations that join later."""
    generator = with_short_turns(kind)
    items = sample_turns(generator, JOINING, keep=True)
    assert sum(len(item.turns) for item in items) > 6
    for k, item in enumerate(items):
        tokens = list(PROMPTS[k])
        for before, turn, logps in item.turns:
            tokens += RESULTS[k] if before > len(tokens) else ()
            assert before == len(tokens)
            [expected] = generator.logps([(tokens, turn)], temperature=SAMPLING.temperature)
            assert logps == pytest.approx(expected, abs=1e-5)
            tokens += turn


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral-window"])
def test_kept_keys_and_values_change_nothing(kind: str) -> None:
    generator = with_short_turns(kind)
    with_cache, without_cache = (
        sample_turns(generator, JOINING, keep=keep) for keep in (True, False)
    )
    assert [item.tokens for item in with_cache] == [item.tokens for item in without_cache]


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
