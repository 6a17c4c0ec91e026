"""Reward models as rewards: a saved one (or a run of one) judges the policy's answers."""

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
from valence.lifecycle.scorers import Numbers, RewardModelScorer, load_scorer
from valence.planning.reward_models import (
    RewardModelSettings,
    load_reward_recipe,
    parse_settings,
    placed_at_reward,
)
from valence.rewards.calls import CallBackend
from valence.rewards.threads import Raised, in_thread
from valence.trainer.prepare import prepare
from valence.trainer.targets import is_run
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

HERE = Origin("an answer", 0)


def as_row(encoder: Encoder, completion: Completion) -> TokenizedExample | Unusable:
    """A completion as the rows that a model was trained on are; of one without text, which no row
    may be, the end alone.
    """
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
    """Calls a reward model on batches of answers, in a thread.

    There is no time limit: it is the machine's own work.
    """

    target: str
    judge: RewardModelScorer
    encoder: Encoder
    settings: RewardModelSettings
    read: Callable[[Encoder, Completion], TokenizedExample | Unusable] = as_row

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "reward model": dict(self.judge.facts),
            "settings": self.settings.model_dump(exclude={"tokens"}),
        }

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        found = await in_thread(lambda: self._scores(completions), None)
        if isinstance(found, Raised):
            raise found.error
        return found

    async def close(self) -> None:
        """It goes with the program."""

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
        found: dict[int, Numbers] = {}
        for batch in make_micro_batches(units, self.settings.tokens, self.judge.device):
            try:
                numbers = self.judge(batch)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"there is no memory for {len(batch.tokens)} tokens of the reward model "
                    f"{self.target} at once",
                    code="out-of-memory",
                    where="reward: settings.tokens", fix="set it lower",
                ) from error  # fmt: skip
            found |= zip(batch.unit.tolist(), numbers, strict=True)
        return [found[k] for k in range(len(units))]

    def _score(self, numbers: Numbers) -> Score:
        given = numbers["normalised" if self.settings.normalised else "score"]
        if not isinstance(given, dict):
            return Score(given)
        chosen = self.settings.attribute
        weights = chosen if isinstance(chosen, dict) else {str(chosen): 1.0}
        return Score(sum(weight * given[name] for name, weight in weights.items()), given)


def as_example(completion: Completion) -> Demonstration:
    """A completion in the form in which rows of a reward model are: chat turns for a chat, text for
    text.
    """
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
    """A reward model's folder or hub id, or the folder of a run that trained one.

    Raises UserError when it is none, or a setting does not fit it.
    """
    given = parse_settings(target, settings, where)
    with placed_at_reward(target, where):
        source, overrides = load_reward_recipe(target, given)
        encoder = prepare(source, rewards=False).encoder
        run = Path(target) if is_run(target) else None
        judge = load_scorer(source, encoder.tokenizer, beta=None, run=run, overrides=overrides)
    if not isinstance(judge, RewardModelScorer):
        what = "this model answers; it gives no scores"
        fix = "name a reward model (a run of bradley_terry, pointwise or ordinal writes one)"
        raise UserError(
            what, code="reward-not-a-reward-model", where=f"{where}.reward: {target}", fix=fix
        )
    _check(judge, given, f"{where}.settings")
    return ModelScores(target, judge, encoder, given)


def _check(judge: RewardModelScorer, settings: RewardModelSettings, where: str) -> None:
    """Raises UserError for settings that the model has nothing for."""
    config: Any = judge.engine.causal.config
    names: list[str] = list(config.id2label.values())
    chosen = settings.attribute
    wanted = list(chosen) if isinstance(chosen, dict) else [chosen] if chosen is not None else []
    lacking = [name for name in wanted if name not in names]
    if lacking or (len(names) > 1 and not wanted) or (len(names) == 1 and isinstance(chosen, dict)):
        what = f"the model scores {', '.join(names)}" + (f", not {lacking[0]}" if lacking else "")
        raise UserError(
            what,
            code="reward-attribute",
            where=f"{where}.attribute",
            fix="name one of them, or give several a weight each"
            if len(names) > 1
            else "remove it",
        )
    if settings.normalised and not getattr(config, "reward_std", None):
        raise UserError(
            "no mean and deviation are saved with the model",
            code="reward-not-normalised",
            where=f"{where}.normalised",
            fix="remove it",
        )
