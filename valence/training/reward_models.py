"""Reward models as rewards: score completions with a saved model or the run that trained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from valence.batching.micro_batches import make_micro_batches
from valence.data.encode import Encoder
from valence.data.encoded_set import Unusable
from valence.errors import UserError
from valence.reports.run_record import is_run
from valence.rewards.calls import CallBackend
from valence.rewards.threads import in_thread
from valence.training.prepare import prepare
from valence.training.reward_recipes import (
    RewardModelSettings,
    find_reward_model,
    parse_settings,
    placed_at_reward,
)
from valence.training.scorers import Numbers, RewardModelScorer, load_scorer
from valence.types import (
    Chat,
    Completion,
    Content,
    Demonstration,
    Origin,
    Score,
    TokenizedCompletion,
    TokenizedExample,
)
from valence.user_code.attempt import Raised

HERE = Origin("a completion", 0)


def as_row(encoder: Encoder, completion: Completion) -> TokenizedExample | Unusable:
    """Tokenize a completion as a training row; without text, it is the end token alone."""
    if completion.text.strip():
        return encoder.encode(as_example(completion))
    unit = encoder.encode(as_example(replace(completion, text=".")))
    return (
        replace(unit, answers=(TokenizedCompletion(unit.answers[0].ids[-1:], (True,)),))
        if isinstance(unit, TokenizedExample)
        else unit
    )


@dataclass
class ModelScores:
    """Score completions with a reward model, in a thread, without a time limit."""

    target: str
    scorer: RewardModelScorer
    encoder: Encoder
    settings: RewardModelSettings
    read: Callable[[Encoder, Completion], TokenizedExample | Unusable] = as_row

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "reward model": dict(self.scorer.facts),
            "settings": self.settings.model_dump(exclude={"tokens"}),
            "encoder": self.encoder.digest,
        }

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        result = await in_thread(lambda: self._scores(completions), None)
        if isinstance(result, Raised):
            raise result.error
        return result

    async def close(self) -> None:
        """Nothing to release: the model lives as long as the program."""

    def _scores(self, completions: Sequence[Completion]) -> list[Score]:
        encoded = [self.read(self.encoder, completion) for completion in completions]
        places = [i for i, unit in enumerate(encoded) if isinstance(unit, TokenizedExample)]
        numbers = dict(
            zip(
                places,
                self._numbers([cast(TokenizedExample, encoded[i]) for i in places]),
                strict=True,
            )
        )
        return [
            Score(None, error=f"the reward model cannot read it: "
                              f"{unit.reason}") if isinstance(unit, Unusable)
            else self._score(numbers[i])
            for i, unit in enumerate(encoded)
        ]  # fmt: skip

    def _numbers(self, units: Sequence[TokenizedExample]) -> list[Numbers]:
        results: dict[int, Numbers] = {}
        for batch in make_micro_batches(units, self.settings.tokens, self.scorer.device):
            try:
                numbers = self.scorer(batch)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory with {len(batch.tokens)} tokens of the reward model "
                    f"{self.target} at once",
                    code="out-of-memory",
                    where="reward: settings.tokens",
                    fix="lower this setting: it limits the tokens of one forward pass, and does "
                    "not change the scores",
                ) from error  # fmt: skip
            results |= zip(batch.unit.tolist(), numbers, strict=True)
        return [results[k] for k in range(len(units))]

    def _score(self, numbers: Numbers) -> Score:
        score = numbers["normalised" if self.settings.normalised else "score"]
        if not isinstance(score, dict):
            return Score(score)
        chosen = self.settings.attribute
        weights = chosen if isinstance(chosen, dict) else {str(chosen): 1.0}
        return Score(sum(weight * score[name] for name, weight in weights.items()), score)


def as_example(completion: Completion) -> Demonstration:
    """A completion as a row of a reward model: chat turns for a chat, text for text."""
    prompt: Content = (
        completion.prompt
        if isinstance(completion.prompt, str)
        else Chat(completion.prompt, completion.tools)
    )
    answer: Content = completion.text
    if isinstance(prompt, Chat):
        answer = Chat(({"role": "assistant", "content": completion.text},))
    return Demonstration(prompt=prompt, completion=answer, origin=HERE)


def reward_model(target: str, settings: Mapping[str, Any], where: str) -> CallBackend:
    """Load a reward model from a folder, a hub id, or the folder of a run that trained one.

    Raises UserError if it is not a reward model or does not support a setting.
    """
    parsed = parse_settings(target, settings, where)
    source, overrides = find_reward_model(target, parsed, where)
    with placed_at_reward(target, where):
        encoder = prepare(source, rewards=False).encoder
        run = Path(target) if is_run(target) else None
        scorer = load_scorer(source, encoder.tokenizer, beta=None, run=run, overrides=overrides)
    assert isinstance(scorer, RewardModelScorer)
    _check(scorer, parsed, f"{where}.settings")
    return ModelScores(target, scorer, encoder, parsed)


def reward_model_must_exist(target: str, settings: Mapping[str, Any], where: str) -> None:
    """Raise UserError if there is no reward model of this name. Loads no weights."""
    find_reward_model(target, parse_settings(target, settings, where), where)


def _check(scorer: RewardModelScorer, settings: RewardModelSettings, where: str) -> None:
    """Raise UserError for settings that the model does not support."""
    config: Any = scorer.engine.causal.config
    names: list[str] = list(config.id2label.values())
    chosen = settings.attribute
    wanted = list(chosen) if isinstance(chosen, dict) else [chosen] if chosen is not None else []
    missing = [name for name in wanted if name not in names]
    if missing or (len(names) > 1 and not wanted) or (len(names) == 1 and isinstance(chosen, dict)):
        raise UserError(
            f"the model scores {', '.join(names)}" + (f", not {missing[0]}" if missing else ""),
            code="reward-attribute",
            where=f"{where}.attribute",
            fix="use one of them, or several with a weight each" if len(names) > 1 else "remove it",
        )
    if settings.normalised and not getattr(config, "reward_std", None):
        raise UserError(
            "the model has no saved mean and standard deviation",
            code="reward-not-normalised",
            where=f"{where}.normalised",
            fix="remove it",
        )
