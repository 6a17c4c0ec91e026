"""The tables of methods: what a run is called, the loss it trains with, what it makes of the
policy's own answers if it learns from these, and the settings that follow from all that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from valence.config.learning_rates import LEARNING_RATES, LearningRates
from valence.config.schema import Recipe
from valence.errors import UserError
from valence.losses import LOSSES, Loss
from valence.losses.advantage import CREDITS
from valence.trainer.sample_builders import (
    Credited,
    SampleBuilder,
    best_of_n,
    exclusion_reasons,
    pairs,
    thumbs,
)
from valence.types import Kind


@dataclass(frozen=True)
class Method:
    """A way to train: a name, and the row of the loss table it uses.

    ``makes``: of the answers of a round what that loss trains on, where the policy learns from its
    own.
    """

    name: str
    loss: Loss
    makes: SampleBuilder | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of settings, where they differ from those of the loss."""
    rollout_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of ``rollout`` settings that are null in the schema, for methods that are online."""
    fills: bool = False
    """Whether prompts whose answers all have the same reward are left out, and others sampled in
    their place.
    """

    @property
    def online(self) -> bool:
        """Whether it learns from the policy's own answers to the prompts that are its data."""
        return self.makes is not None

    @property
    def kind(self) -> Kind:
        """What one row of its data is."""
        return "prompt" if self.online else self.loss.data

    @property
    def needs_reference(self) -> bool:
        """Whether settings of the reference may have an effect. ``reads_reference`` says whether a
        run loads one."""
        return self.online or self.loss.needs_reference

    def loss_reads_reference(self, settings: Mapping[str, Any]) -> bool:
        """Whether the loss, or the advantages of an online method, need it. settings: of the
        loss.
        """
        refers = self.asks_reference or self.loss.refers(settings)
        return refers or (self.online and bool(settings.get("kl_beta")))

    @property
    def asks_reference(self) -> bool:
        """Whether a step runs the reference.

        Tokens with an advantage of their own come with what it says of them.
        """
        return self.loss.needs_reference and not self.is_on_policy

    @property
    def is_on_policy(self) -> bool:
        """Whether its loss compares with the policy that answered, at the temperature of
        sampling.
        """
        return isinstance(self.makes, Credited)

    @property
    def least_rollouts(self) -> int:
        """Answers to a prompt below which there is nothing to learn."""
        compares = self.makes is not None and (
            self.makes.fn in (best_of_n, pairs, thumbs) or "group" in self.makes.reads
        )
        return 2 if compares else 1

    @property
    def is_reward_model(self) -> bool:
        return self.loss.is_reward_model

    @property
    def learning_rates(self) -> LearningRates:
        """Default learning rates."""
        if self.is_reward_model:
            kind = "reward_model"
        elif self.loss.data == "demonstration":
            kind = "imitation"
        elif self.loss.data == "ranking":
            kind = "policy_gradient"
        else:
            kind = self.name.removeprefix("online_")
        return LEARNING_RATES.get(kind, LEARNING_RATES["preference"])

    @property
    def needs_kl_pairs(self) -> bool:
        """Does a step also measure completions behind prompts that they do not answer (for z0)?"""
        return self.loss.statistic is not None

    def without_effect(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return self.loss.without_effect(settings)

    def contradictions(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return self.loss.contradictions(settings)

    @cached_property
    def settings(self) -> type[BaseModel]:
        """The ``loss`` section of a recipe, derived from the signatures: types, bounds, defaults
        and what each means.
        """
        functions = (
            self.loss.functions if self.makes is None else (*self.loss.functions, self.makes.fn)
        )
        meanings = {k: v for fn in functions for k, v in setting_docs(fn.__doc__ or "").items()}
        parameters = (
            self.loss.settings if self.makes is None else self.loss.settings | self.makes.settings
        )
        fields: dict[str, Any] = {
            name: (
                p.annotation,
                Field(default=self.defaults.get(name, p.default), description=meanings.get(name)),
            )
            for name, p in parameters.items()
        }
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        return create_model(f"{self.name}_loss", __config__=config, **fields)

    def resolve(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The given settings checked, with the defaults filled in.

        Raises pydantic.ValidationError.
        """
        return self.settings(**settings).model_dump()


def setting_docs(doc: str) -> dict[str, str]:
    """Meanings of a function's settings: the lines ``name: meaning`` at the end of its
    docstring.
    """
    tail = doc.rstrip().rsplit("\n\n", 1)[-1]
    found = re.findall(r"^ *([a-z]\w*): (.+(?:\n {8,}.+)*)", tail, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


METHODS: dict[str, Method] = {name: Method(name, loss) for name, loss in LOSSES.items()}
"""Those that learn from rows as they are."""

ROLLOUT_DEFAULTS: dict[str, Any] = {"epochs": 1, "mask_truncated": False}
"""Of every online method, unless the table below names others."""

PPO_EPOCHS = 4
"""Passes over a round. In a single step of a single pass the probability ratio is 1 everywhere, so
PPO's clip never acts. Ziegler et al. 2019 (arXiv 1909.08593) and Ouyang et al. 2022 (arXiv
2203.02155), as their public implementations, make 4 passes."""


def _online(name: str, loss: Loss, makes: SampleBuilder, **changes: Any) -> Method:
    """An online method. changes: of its defaults and other fields."""
    rollout = ROLLOUT_DEFAULTS | changes.pop("rollout", {})
    return Method(name, loss, makes, rollout_defaults=rollout, **changes)


ONLINE: dict[str, Method] = {
    "rejection": _online(
        "rejection", LOSSES["sft"], SampleBuilder(best_of_n, exclusion_reasons),
        rollout={"mask_truncated": True},
    ),
    **{
        f"online_{name}": _online(f"online_{name}", row, SampleBuilder(pairs))
        for name, row in LOSSES.items()
        if row.view == "pair"
    },
    **{
        f"online_{name}": _online(f"online_{name}", row, SampleBuilder(thumbs))
        for name, row in LOSSES.items()
        if row.data == "judgement"
    },
    **{
        name: _online(name, LOSSES[name], Credited(credit), fills=name == "dapo")
        for name, credit in CREDITS.items()
        if name != "ppo"
    },
    "ppo": _online(
        "ppo", LOSSES["ppo"], Credited(CREDITS["ppo"]),
        defaults={"value": True}, rollout={"epochs": PPO_EPOCHS},
    ),
}  # fmt: skip
"""Those that learn from the policy's own answers, judged by a reward."""


def method_of(name: str, online: bool = False) -> Method:
    """The row of a method or loss. online: that learns from the policy's own answers.

    Raises UserError with the nearest names.
    """
    table = ONLINE if online else METHODS
    if name in table:
        return table[name]
    if name in ONLINE:
        raise UserError(
            f"{name} learns from the policy's own answers, and nothing judges them",
            code="method-needs-reward",
            where="method",
            fix="set reward",
        )
    if name in METHODS:
        named = [other for other in (f"online_{name}", "rejection", *CREDITS) if other in ONLINE]
        what = f"{name} learns from the answers of its rows, not from the policy's own"
        raise UserError(
            what,
            code="method-without-reward",
            where="method",
            fix=f"remove reward, or choose {', '.join(named[:-1])} or {named[-1]}",
        )
    every = {**METHODS, **ONLINE}
    written = str(name).lower().replace("-", "_")
    near = [written] if written in every else get_close_matches(written, every, 2, 0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"there is no method {name!r}",
        code="method-unknown",
        where="method",
        fix=f"{hint}methods: {', '.join(every)}",
    )


def settings_of_step(recipe: Recipe) -> dict[str, Any]:
    """Those of the loss, with what else in the recipe says one of them."""
    limit = (
        {"max_tokens": recipe.rollout.max_new_tokens}
        if recipe.reward and recipe.loss.get("max_tokens", 0) is None
        else {}
    )
    return {**recipe.loss, **limit}


def reads_reference(recipe: Recipe) -> bool:
    """Whether a run of this recipe needs a reference."""
    method = method_in(recipe)
    if not method.online:
        return method.needs_reference
    if method.loss_reads_reference(recipe.loss):
        return True
    return recipe.measures_kl


def read_of_tokens(recipe: Recipe, *, reference: bool) -> tuple[str, ...]:
    """What is measured of the tokens of own answers, as little as the method can do with: `old` and
    `ref`, log-probabilities of the policy and of the reference (if there is one), and `value`.
    """
    method, rollout = method_in(recipe), recipe.rollout
    assert method.makes is not None
    reads = method.makes.reads
    # the policy moves within the round
    several = method.is_on_policy and rollout.steps_per_round > 1
    old = several or "old_t" in reads or "value_t" in reads or rollout.engine == "vllm"
    # The sampler's log-probabilities are over its nucleus then, those of the reference over all
    # tokens.
    old = old or rollout.top_p < 1
    wanted = {"old": old, "ref": reference, "value": "value_t" in reads}
    return tuple(name for name, it in wanted.items() if it)


def method_in(recipe: Recipe) -> Method:
    """The row that a recipe names."""
    return method_of(recipe.method, bool(recipe.reward))
