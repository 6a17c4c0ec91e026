"""The settings of reward models in a recipe, and the recipe that each of them is loaded by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from valence.config.load import LISTS, LoadedRecipe
from valence.config.needs import method_in
from valence.config.schema import Dtype
from valence.errors import UserError
from valence.models.loading import load_config
from valence.models.scores import has_score_head
from valence.reports.run_record import is_run
from valence.rewards.build import KINDS
from valence.rewards.settings import read_settings
from valence.targets import load_target


class RewardModelSettings(BaseModel):
    """The settings of a reward model in a recipe's reward section."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    attribute: str | dict[str, float] | None = None
    """For a model with several attributes: the one that counts, or the weight of each."""
    normalised: bool = False
    """Scale scores to mean 0 and standard deviation 1 over the model's training rows."""
    max_length: int = Field(2048, gt=0)
    """Maximum tokens of a prompt with its answer; longer ones have no score."""
    as_chat: Literal["auto"] | bool | None = None
    """Whether a plain-text prompt becomes a user message, like data.as_chat.

    Default: that of the run that trained the model; for a model folder, whether its tokenizer has
    a chat template.
    """
    tokens: int = Field(8192, gt=0)
    """Tokens per forward pass."""
    dtype: Dtype | None = None
    """Data type of the weights. Default: that of the run that trained the model, else float32."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


def parse_settings(target: str, settings: Mapping[str, Any], where: str) -> RewardModelSettings:
    """Return the settings of a reward model. where: of its entry in the recipe.

    Raises UserError for an unknown name or a wrong value.
    """
    subject = f"reward model {target}"
    return read_settings(RewardModelSettings, settings, f"{where}.settings", subject, "rewards")


@contextmanager
def placed_at_reward(target: str, where: str) -> Iterator[None]:
    """Inside the block, a UserError names the entry of the recipe that names the reward model."""
    try:
        yield
    except UserError as error:
        fix = error.fix if Path(target).exists() or "/" in target else f"use {KINDS}"
        is_here = (
            error.where in ("model.name", f"{target} (model.name)")
            or error.code == "max-length-too-large"
        )
        place = "" if is_here else f" ({error.where})"
        raise UserError(
            error.message,
            code=error.code,
            where=f"{where}.reward: {target}{place}",
            fix=fix,
        ) from error


def load_reward_recipe(
    target: str, settings: RewardModelSettings
) -> tuple[LoadedRecipe, list[str]]:
    """Return the recipe of a reward model, and the overrides that it was loaded with."""
    model = {"dtype": settings.dtype, "trust_remote_code": settings.trust_remote_code or None}
    overrides = [
        f"model.{name}={str(value).lower()}" for name, value in model.items() if value is not None
    ]
    overrides += [f"data.max_length={settings.max_length}", "reference.cache=off"]
    if settings.as_chat is not None:
        overrides.append(f"data.as_chat={str(settings.as_chat).lower()}")
    overrides += [f"data.{name}=[]" for name in LISTS]
    return load_target(target, overrides), overrides


def find_reward_model(
    target: str, settings: RewardModelSettings, where: str
) -> tuple[LoadedRecipe, list[str]]:
    """``load_reward_recipe`` of a target that is a reward model. Loads no weights.

    Raises UserError if the model does not exist, or is a language model.
    """
    with placed_at_reward(target, where):
        source, overrides = load_reward_recipe(target, settings)
        spec = source.recipe.model
        if is_run(target):
            is_reward_model = method_in(source.recipe).is_reward_model
        else:
            config = load_config(
                spec.name, trust_remote_code=spec.trust_remote_code, gguf_file=spec.gguf_file
            )
            is_reward_model = spec.gguf_file is None and has_score_head(config)
    if not is_reward_model:
        raise UserError(
            "this is a language model, not a reward model",
            code="reward-not-a-reward-model",
            where=f"{where}.reward: {target}",
            fix="use a reward model, such as a run of bradley_terry, pointwise or ordinal",
        )
    return source, overrides
