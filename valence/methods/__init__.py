"""The tables of methods: their losses, how online methods build examples, and their settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from valence.data.kind_names import METHOD_FOR, method_for
from valence.errors import UserError
from valence.losses import LOSSES, Loss
from valence.methods.custom import check_advantage, check_loss, custom_loss, is_advantage
from valence.methods.learning_rates import LEARNING_RATES, LearningRates
from valence.methods.sample_builders import (
    AdvantageBuilder,
    SampleBuilder,
    best_of_n,
    binary_labels,
    exclusion_reasons,
    preference_pairs,
    teacher_exclusions,
    with_teachers,
)
from valence.types import Kind
from valence.user_code.attempt import Raised, attempt, describe_error
from valence.user_code.load import is_import_path, load_object
from valence.user_code.settings import setting_docs, settings_model
from valence.user_code.sources import code_digest


@dataclass(frozen=True)
class Method:
    """A way to train: a name, and the row of the loss table it uses.

    sample_builder: builds the training examples of an online method from the completions of a
    round.
    """

    name: str
    loss: Loss
    sample_builder: SampleBuilder | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of settings that differ from those of the loss."""
    rollout_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of ``rollout`` settings that are null in the schema, for methods that are online."""

    @property
    def is_custom(self) -> bool:
        """Whether its loss or advantage is not part of Valence."""
        return is_import_path(self.name)

    @property
    def source(self) -> str | None:
        """Digest of the code of a user's loss or advantage; None for a method of Valence."""
        if not self.is_custom:
            return None
        loss = self.loss
        functions = (*loss.functions, *([loss.advantage] if loss.advantage else ()))
        fields = loss.view, loss.average, loss.data, loss.couples, loss.modifiers, loss.defaults
        return code_digest((fn for fn in functions if not _is_valence(fn)), fields)

    @property
    def stand_in(self) -> str:
        """The method of Valence with which a run is opened where its loss is not needed: one for
        the same rows. The user's code is then neither needed nor executed.
        """
        table = ONLINE if self.online else METHODS
        loss = self.loss
        fitting = {
            name: m.loss.needs_reference == loss.needs_reference
            for name, m in table.items()
            if (m.loss.data, m.is_reward_model) == (loss.data, self.is_reward_model)
        }
        return max(fitting, key=lambda name: fitting[name])

    @property
    def selects_best(self) -> bool:
        """Whether it imitates the best completions of each prompt."""
        return self.sample_builder is not None and self.sample_builder.fn is best_of_n

    def check(self, settings: Mapping[str, Any], where: str = "method") -> None:
        """Raise UserError if its loss or advantage is a user's and breaks the contract.

        where: the setting that names it.
        """
        if not self.is_custom:
            return
        check_loss(self.loss, self.name, settings, where)
        if self.is_on_policy and self.loss.advantage and not _is_valence(self.loss.advantage):
            check_advantage(self.loss.advantage, self.name, settings, where)

    @property
    def online(self) -> bool:
        """Whether it trains on completions that the policy samples for the prompts of the data."""
        return self.sample_builder is not None

    @property
    def kind(self) -> Kind:
        """The kind of its rows."""
        return "prompt" if self.online else self.loss.data

    @property
    def needs_reference(self) -> bool:
        """Whether settings of the reference may have an effect.

        ``reads_reference`` says whether a run loads one.
        """
        return self.online or self.loss.needs_reference

    def loss_reads_reference(self, settings: Mapping[str, Any]) -> bool:
        """Whether the loss or the advantages read the reference. settings: of the loss section."""
        refers = self.asks_reference or self.loss.refers(settings)
        return refers or (self.online and bool(settings.get("kl_beta")))

    @property
    def asks_reference(self) -> bool:
        """Whether a step computes the reference's log-probabilities.

        Completions with advantages already carry them as a token column.
        """
        return self.loss.needs_reference and not self.is_on_policy

    @property
    def is_on_policy(self) -> bool:
        """Whether its loss compares with the sampling policy, at the sampling temperature."""
        is_distilled = self.online and self.loss.needs_teacher
        return is_distilled or isinstance(self.sample_builder, AdvantageBuilder)

    @property
    def min_rollouts(self) -> int:
        """The smallest number of completions per prompt that the method can learn from."""
        builder = self.sample_builder
        compares = builder is not None and (
            builder.fn in (best_of_n, preference_pairs, binary_labels) or "group" in builder.reads
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
        elif self.loss.needs_teacher:
            kind = "distillation"
        elif self.loss.data == "demonstration":
            kind = "imitation"
        elif self.loss.data == "ranking":
            kind = "policy_gradient"
        else:
            kind = self.name.removeprefix("online_")
        return LEARNING_RATES.get(kind, LEARNING_RATES["preference"])

    @property
    def needs_kl_pairs(self) -> bool:
        """Whether a step also computes mismatched prompts and completions, to estimate z0."""
        return self.loss.statistic is not None

    def without_effect(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return self.loss.without_effect(settings)

    def contradictions(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return self.loss.contradictions(settings)

    @cached_property
    def settings(self) -> type[BaseModel]:
        """The ``loss`` section of a recipe, derived from signatures and docstrings."""
        functions, parameters = self.loss.functions, self.loss.settings
        if self.sample_builder is not None:
            functions = (*functions, self.sample_builder.fn)
            parameters = parameters | self.sample_builder.settings
        meanings = {k: v for fn in functions for k, v in setting_docs(fn.__doc__ or "").items()}
        typed = [
            _with_type(p.replace(default=self.defaults.get(p.name, p.default)))
            for p in parameters.values()
        ]
        return settings_model(f"{self.name}_loss", typed, meanings, validate_default=self.is_custom)

    def resolve(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Validate settings and add defaults. Raises pydantic.ValidationError."""
        return self.settings(**settings).model_dump()


def _is_valence(fn: Callable[..., Any]) -> bool:
    return str(getattr(fn, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _with_type(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter with an annotation. If a user's function has none: the type of the default."""
    default = parameter.default
    if parameter.annotation is not parameter.empty:
        return parameter
    if default is parameter.empty or default is None:
        return parameter.replace(annotation=Any)
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return parameter.replace(annotation=float if is_number else type(default))


METHODS: dict[str, Method] = {name: Method(name, loss) for name, loss in LOSSES.items()}
"""Methods that train on the rows of the data."""

ROLLOUT_DEFAULTS: dict[str, Any] = {"epochs": 1, "mask_truncated": False, "replace_tied": False}
"""Rollout defaults of online methods, unless the table below overrides them."""

PPO_EPOCHS = 4
"""Passes over a round. In a single step of a single pass the probability ratio is 1 everywhere, so
PPO's clip never acts. Ziegler et al. 2019 (arXiv 1909.08593) and Ouyang et al. 2022 (arXiv
2203.02155), as their public implementations, make 4 passes."""


def _online(name: str, loss: Loss, **changes: Any) -> Method:
    """An online method, whose examples are of the kind that the loss reads.

    changes: other fields of Method, and ``rollout`` defaults.
    """
    rollout = ROLLOUT_DEFAULTS | changes.pop("rollout", {})
    if loss.data == "ranking":
        assert loss.advantage is not None
        builder: SampleBuilder = AdvantageBuilder(loss.advantage)
    elif loss.needs_teacher:
        reasons = "truncated", "no_feedback", "too_long", "unknown_token"
        builder = SampleBuilder(with_teachers, teacher_exclusions, reasons)
    elif loss.data == "demonstration":
        reasons = "tied", "truncated", "low_reward", "worst"
        builder = SampleBuilder(best_of_n, exclusion_reasons, reasons)
        rollout = {**rollout, "mask_truncated": True}
    else:
        builder = SampleBuilder(preference_pairs if loss.data == "preference" else binary_labels)
    return Method(name, loss, builder, rollout_defaults=rollout, **changes)


ONLINE: dict[str, Method] = {
    "rejection": _online("rejection", LOSSES["sft"]),
    **{
        f"online_{name}": _online(f"online_{name}", row)
        for kind in ("preference", "judgement")
        for name, row in LOSSES.items()
        if row.data == kind and not row.is_reward_model
    },
    **{
        name: _online(name, row, rollout={"replace_tied": name == "dapo"})
        for name, row in LOSSES.items()
        if row.advantage is not None
    },
    "hindsight": _online("hindsight", LOSSES["hindsight"]),
    "online_distill": _online("online_distill", LOSSES["distill"]),
    "ppo": _online("ppo", LOSSES["ppo"], defaults={"value": True}, rollout={"epochs": PPO_EPOCHS}),
}
"""Methods that train on completions that the policy samples."""

WITHOUT_REWARD = frozenset(("online_distill",))
"""Online methods that do not need a reward, which is only reported if there is one."""

_custom: dict[tuple[str, bool], tuple[object, Method]] = {}


def _custom_method(target: str, online: bool) -> Method:
    """The method of a loss or an advantage from outside of Valence, by its import path."""
    value = load_object(target, "method", "method")
    known = _custom.get((target, online))
    if known is None or known[0] is not value:  # a module may have been loaded again
        loss = custom_loss(value, target)
        if online and loss.is_reward_model:
            raise UserError(
                f"{target} trains a reward model and uses no reward",
                code="method-without-reward",
                where="method",
                fix="remove reward",
            )
        if not online and is_advantage(value):
            raise _needs_reward(target)
        method = _online(target, loss) if online else Method(target, loss)
        settings = attempt(lambda: _defaults_as_json(method))
        if isinstance(settings, Raised):
            raise UserError(
                f"the settings of {target} cannot be read: {describe_error(settings.error)}",
                code="loss-signature",
                where="method",
                fix="give them types and defaults that JSON has: numbers, texts, true or false",
            )
        known = _custom[target, online] = (value, method)
    return known[1]


def _defaults_as_json(method: Method) -> str:
    """The defaults of a method's settings as the log and recipes have them."""
    fields = method.settings.model_fields.items()
    return json.dumps({n: f.default for n, f in fields if not f.is_required()}, allow_nan=False)


def _needs_reward(name: str) -> UserError:
    return UserError(
        f"{name} trains on sampled completions and needs a reward",
        code="method-needs-reward",
        where="method",
        fix="set reward to a rule (`valence docs` lists them), a function, a reward model or a "
        "server",
    )


def method_of(name: str, online: bool = False) -> Method:
    """The method with this name, or of the loss with this import path.

    online: whether the recipe has a reward. Raises UserError with the nearest names.
    """
    if is_import_path(name):
        return _custom_method(name, online)
    table = ONLINE if online else METHODS
    if name in table:
        return table[name]
    if name in ONLINE:
        raise _needs_reward(name)
    if name in METHODS:
        others = [other for other in (f"online_{name}", "rejection", *LOSSES) if other in ONLINE]
        raise UserError(
            f"{name} trains on the completions in its rows and uses no reward",
            code="method-without-reward",
            where="method",
            fix=f"remove reward, or choose {', '.join(others[:-1])} or {others[-1]}",
        )
    module, _, last = name.rpartition(".")
    near = [f"{module}:{last}"] if module and is_import_path(f"{module}:{last}") else []
    near = near or similar_methods(name)
    main = dict.fromkeys(suggested.split()[0] for suggested in METHOD_FOR.values())
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"there is no method {name!r}",
        code="method-unknown",
        where="method",
        fix=f"{hint}the main methods are {', '.join(main)}; `valence docs` lists all",
    )


def similar_methods(name: str, cutoff: float = 0.4) -> list[str]:
    """The methods that an unknown name may stand for: in other letters, for rows of that name, or
    spelled similarly.

    cutoff: the smallest similarity, from 0 to 1.
    """
    methods = {**METHODS, **ONLINE}
    normalized = name.lower().replace("-", "_").replace(" ", "_")
    if normalized in methods:
        return [normalized]
    if of_rows := method_for(normalized):
        return [of_rows]
    close = get_close_matches(normalized, methods, 2, max(cutoff, 0.6))
    return close or get_close_matches(normalized, methods, 1, cutoff)
