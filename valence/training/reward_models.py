"""Reward models as rewards: a saved one (or a run of one) judges the policy's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from valence.batching.micro_batches import make_micro_batches
from valence.config.load import LISTS, LoadedRecipe
from valence.config.schema import Dtype, Recipe
from valence.data.encode import Encoder, Unusable
from valence.errors import UserError
from valence.models.build import DTYPES
from valence.models.shape import skeleton
from valence.rewards.build import KINDS
from valence.rewards.calls import CallBackend
from valence.rewards.rules import code_of, said
from valence.rewards.threads import Raised, in_thread
from valence.training.judges import Numbers, RewardJudge, load_judge
from valence.training.online.sources import models_that_judge
from valence.training.setup import prepare
from valence.training.sharding import at_rest
from valence.training.target import is_run, load_target
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


class Settings(BaseModel):
    """Of a reward model in a recipe's reward section."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    attribute: str | dict[str, float] | None = None
    """Of a model with several: the one that counts, or several with the weight of each."""
    normalised: bool = False
    """Scores with a mean of 0 and a standard deviation of 1 over the rows that it was trained
    on.
    """
    max_length: int = Field(2048, gt=0)
    """Longest prompt with its answer, in tokens; longer ones have no score."""
    as_chat: Literal["auto"] | bool | None = None
    """Whether a prompt that is plain text becomes a user message, as data.as_chat.

    Default: as the run that trained the model did; of a model's folder, exactly when its tokenizer
    has a chat template.
    """
    tokens: int = Field(8192, gt=0)
    """That run at once."""
    dtype: Dtype | None = None
    """Of its weights. Default: that of the run which trained it; float32 for another model."""
    trust_remote_code: bool = False
    """Run the code that the model comes with."""


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
    judge: RewardJudge
    encoder: Encoder
    settings: Settings
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
    given = _settings(target, settings, where)
    with _placed(target, where):
        source, ours = _recipe(target, given)
        encoder = prepare(source, rewards=False).encoder
        run = Path(target) if is_run(target) else None
        judge = load_judge(source, encoder.tokenizer, beta=None, run=run, overrides=ours)
    if not isinstance(judge, RewardJudge):
        what = "this model answers; it gives no scores"
        fix = "name a reward model (a run of bradley_terry, pointwise or ordinal writes one)"
        raise UserError(
            what, code="reward-not-a-reward-model", where=f"{where}.reward: {target}", fix=fix
        )
    _check(judge, given, f"{where}.settings")
    return ModelScores(target, judge, encoder, given)


def bytes_of_rewards(recipe: Recipe) -> int:
    """Of the weights of all reward models that a recipe names, before any is loaded.

    Raises UserError when there is no such.
    """
    return sum(
        _bytes(target, _settings(target, settings, where), where)
        for target, settings, where in models_that_judge(recipe)
    )


def _bytes(target: str, given: Settings, where: str) -> int:
    with _placed(target, where):
        source, _ = _recipe(target, given)
        spec = source.recipe.model
        dtype = at_rest(source.recipe) if is_run(target) else DTYPES[spec.dtype]
        layers = skeleton(spec.name, trust_remote_code=spec.trust_remote_code, scores=1)
        return sum(p.numel() for p in layers.parameters()) * dtype.itemsize


def _settings(target: str, settings: Mapping[str, Any], where: str) -> Settings:
    try:
        return Settings(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        place, names = (
            ".".join(map(str, (where, "settings", *first["loc"]))),
            ", ".join(Settings.model_fields),
        )
        raise UserError(
            f"{said(first)} (reward model {target})",
            code=code_of(first),
            where=place,
            fix=f"its settings are {names}",
        ) from error


@contextmanager
def _placed(target: str, where: str) -> Iterator[None]:
    """What is wrong with a reward model, said of the entry that names it."""
    try:
        yield
    except UserError as error:
        fix = error.fix if Path(target).exists() or "/" in target else f"name {KINDS}"
        raise UserError(
            error.what, code=error.code, where=f"{where}.reward: {target} ({error.where})", fix=fix
        ) from error


def _recipe(target: str, given: Settings) -> tuple[LoadedRecipe, list[str]]:
    """The recipe that a reward model is loaded by, and what is changed in that which it has or
    stands for.
    """
    model = {"dtype": given.dtype, "trust_remote_code": given.trust_remote_code or None}
    ours = [
        f"model.{name}={str(value).lower()}" for name, value in model.items() if value is not None
    ]
    ours += [f"data.max_length={given.max_length}", "reference.cache=off"]
    ours += [] if given.as_chat is None else [f"data.as_chat={str(given.as_chat).lower()}"]
    ours += [f"data.{name}=[]" for name in LISTS]
    return load_target(target, ours), ours


def _check(judge: RewardJudge, settings: Settings, where: str) -> None:
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
