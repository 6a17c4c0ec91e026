"""The table of losses.

A loss is a pure function of named tensors; its table row says what it reads and how it is averaged.

Positional parameters name the tensors that ``views.py`` supplies; keyword-only parameters are the
settings of a recipe's ``loss`` section. A loss with a ``ref`` parameter needs a reference model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from valence.losses import (
    advantage,
    coupled,
    distillation,
    imitation,
    metrics,
    policy,
    preference,
    reward,
    stats,
    unpaired,
)
from valence.losses.average import AVERAGE_OF, INSIDE, OF_TOKENS, Average, among, weighted_sum
from valence.losses.lazy import Tensor, torch
from valence.losses.metrics import Metrics, Rewards, Settings
from valence.losses.modifiers import MODIFIERS, Modifier, Needs
from valence.losses.views import (
    COMPUTED,
    INPUTS,
    OF_SAMPLES,
    VIEWS,
    Named,
    View,
    token_columns,
)
from valence.types import Kind, MicroBatch, PolicyOutput

__all__ = ["LOSSES", "Loss"]

Direction = Literal[-1, 0, 1]


_DERIVED: Any = None
"""Fields of a loss that follow from the inputs of its function, unless they are given."""


@dataclass(frozen=True)
class Loss:
    """A loss: a function of named tensors, how it is averaged, and what else it needs.

    Only ``fn`` is required. Its positional parameters name tensors of one of the ``VIEWS``, and its
    keyword-only parameters are settings. The function returns one value per token, sequence or
    pair. The view, the average, the rows, the metrics and the implicit reward follow from the
    inputs (``_derived``) unless they are given.

    data: kind of the rows. direction: where a descent step moves each kind of log-probability at
    r = 0 (1 up, -1 down).
    statistic: of mismatched sequences, for z0. balances: counts of both classes -> their weights.
    credit: of stored completions: scores[S], units[S], and mean and deviation of the step's scores
    -> advantages[S]. advantage: of completions of the policy, see ``losses.advantage``.
    shifts: it reads BCO's running delta. couples: the loss of a sequence depends on all others of
    the step.
    defaults: of settings, if they differ from those of a modifier. needs: see Needs. clashes:
    (setting, value, modifier) that cannot be combined.
    """

    fn: Callable[..., Tensor]
    view: View = _DERIVED
    average: Average = _DERIVED
    data: Kind = _DERIVED
    metrics: Callable[..., Metrics] = _DERIVED
    direction: Mapping[str, Direction] = field(default_factory=dict[str, Direction])
    reward: metrics.Reward | None = None
    modifiers: tuple[str, ...] = ()
    statistic: Callable[..., Tensor] | None = None
    credit: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    advantage: Callable[..., Any] | None = None
    balances: Callable[..., tuple[float, float]] | None = None
    shifts: bool = False
    couples: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs: Needs = ()
    clashes: tuple[tuple[str, Any, str], ...] = ()

    def __post_init__(self) -> None:
        for name, value in self._derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _derived(self) -> dict[str, Any]:
        """The fields that follow from the names of the inputs."""
        reads = set(self.reads) - COMPUTED
        view = self.view or next((view for view in INPUTS if reads <= INPUTS[view]), "token")
        fields: dict[str, Any] = {"view": view, "average": AVERAGE_OF.get(view)}
        if view in ("pair", "score_pair"):
            fields["data"] = "preference"
        elif view == "score":
            fields["data"] = "scored"
        elif self.needs_teacher:
            fields["data"] = "feedback"
        elif view == "seq" and "label" in reads:
            fields["data"] = "judgement"
        elif not reads.isdisjoint(OF_SAMPLES):
            fields["data"] = "ranking"
        else:
            fields["data"] = "demonstration"
        data = self.data or fields["data"]
        if view == "score":
            fields["metrics"] = reward.single_scores
        elif view == "score_pair":
            fields["metrics"] = reward.paired_scores
        elif data == "ranking":
            fields |= {
                "metrics": metrics.policy_gradient,
                "credit": advantage.within_group,
                "advantage": advantage.of_group_norm,
            }
        elif view == "token" and self.needs_teacher:
            fields["metrics"] = metrics.distillation
        elif view == "token":
            fields["metrics"] = metrics.imitation
        elif data == "demonstration":
            fields["metrics"] = metrics.none
        else:
            fields["metrics"] = metrics.paired if view == "pair" else metrics.unpaired
            has_reference = any(name.startswith("ref") for name in reads)
            fields["reward"] = metrics.log_ratio if has_reference else metrics.likelihood
        return fields

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the tensors that the function reads."""
        return tuple(
            p.name
            for p in inspect.signature(self.fn).parameters.values()
            if p.kind is not p.KEYWORD_ONLY
        )

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the reference, also in place of the old policy of stored completions."""
        names = ("ref",) if self.needs_teacher else ("ref", "old")
        return any(name.startswith(names) for name in self.reads)

    @property
    def needs_teacher(self) -> bool:
        """Whether it reads the teacher's log-probabilities."""
        return not {"teacher_t", "teacher", "divergence_t"}.isdisjoint(self.reads)

    def divergence(self, settings: Settings) -> tuple[float, int | None] | None:
        """``beta`` and ``top_k`` of the divergence between the distributions of teacher and policy;
        None if it does not read that.
        """
        if "divergence_t" not in self.reads:
            return None
        if self.fn is not distillation.from_teacher:  # whose settings may mean something else
            return 1.0, None
        is_read = settings["target"] == "distribution"
        return (settings["beta"], settings["top_k"]) if is_read else None

    def compares_distributions(self, settings: Settings) -> bool:
        """Whether it compares the distributions of teacher and policy at each token."""
        return self.divergence(settings) is not None

    def refers(self, settings: Settings) -> bool:
        """Whether it reads the reference even if the sampling policy's log-probabilities are known."""
        return any(name.startswith("ref") for name in self.reads) or any(
            m.refers for m in self.acting(None, settings)
        )

    @property
    def is_reward_model(self) -> bool:
        """Whether it trains a reward model."""
        return self.view.startswith("score")

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The functions whose keyword-only parameters are its settings."""
        optional = (self.statistic, self.balances, INSIDE.get(self.average))
        return (
            self.fn,
            *(fn for fn in optional if fn is not None),
            *(MODIFIERS[name].fn for name in self.modifiers),
        )

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        """The settings of the loss section: types and defaults."""
        parameters = [
            p
            for fn in self.functions
            for p in inspect.signature(fn, eval_str=True).parameters.values()
        ]
        return {
            p.name: p.replace(default=self.defaults.get(p.name, p.default))
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        }

    def acting(self, stage: str | None, settings: Settings) -> list[Modifier]:
        """The modifiers of a stage (None: of all) that have an effect under these settings."""
        modifiers = (MODIFIERS[name] for name in self.modifiers)
        return [
            modifier
            for modifier in modifiers
            if stage in (None, modifier.stage) and modifier.acts(settings)
        ]

    def wants(self, settings: Settings) -> tuple[str, ...]:
        """The outputs that the policy model computes besides log-probabilities."""
        return tuple(name for modifier in self.acting(None, settings) for name in modifier.wants)

    def without_effect(self, settings: Settings) -> dict[str, str]:
        """Settings without effect under the others, and the setting that would turn each on."""
        modifiers = [MODIFIERS[name] for name in self.modifiers]
        idle = {
            name: m.idle[0]
            for m in modifiers
            if not m.acts(settings)
            for name in m.settings
            if name != m.idle[0]
        }
        needs = [need for row in (self, *modifiers) for need in row.needs]
        return idle | {
            name: f"{other}: {value}" for name, other, value in needs if settings[other] != value
        }

    def contradictions(self, settings: Settings) -> dict[str, str]:
        """Settings of a modifier that conflict with another setting, and that setting."""
        return {
            MODIFIERS[name].idle[0]: f"{setting}: {str(value).lower()}"
            for setting, value, name in self.clashes
            if settings[setting] == value and MODIFIERS[name].acts(settings)
        }

    def averages(self, settings: Settings) -> list[Average]:
        """The averages of its terms, whose units a step counts before its first forward pass."""
        return list(
            dict.fromkeys([self.average, *(average for average, _ in self._terms(settings))])
        )

    def _terms(self, settings: Settings) -> list[tuple[Average, Modifier]]:
        """The terms that are added to the loss, with their averages."""
        alike = OF_TOKENS.get(self.average, self.average)
        return [
            (m.average(settings) if m.average else alike, m) for m in self.acting("term", settings)
        ]

    def read(
        self, batch: MicroBatch, out: PolicyOutput, ref: Tensor | None, settings: Settings, shared: Mapping[str, Tensor] | None = None,
        view: View | None = None,
    ) -> tuple[Named, Named]:  # fmt: skip
        """The view of a micro-batch without modifiers, and with those of these settings.

        shared: statistics of the whole step (z0, delta). view: another view than the row's.
        """
        columns = token_columns(batch, out, ref)
        if self.credit is not None and "adv_t" not in columns:
            assert batch.target is not None
            assert shared is not None
            advantage = self.credit(
                batch.target[:, 0].to(out.logp.dtype), batch.unit, shared["moments"]
            )
            columns["adv_t"] = advantage[batch.sequence_ids[batch.scored]]
        lay = VIEWS[view or self.view]
        plain = lay(batch, columns) | dict(shared or {})
        changed = columns
        for modifier in self.acting("tokens", settings):
            changed = modifier(changed, batch, settings=settings)
        modified = plain
        if changed is not columns:
            # columns for modifiers are not changed by them
            wanted = {f"{name}_t" for name in self.wants(settings)}
            modified = plain | lay(
                batch, {name: values for name, values in changed.items() if name not in wanted}
            )
        for modifier in self.acting("view", settings) if view is None else ():
            modified = modifier(modified, settings=settings)
        return plain, modified

    def __call__(self, view: Mapping[str, Tensor], settings: Settings) -> Tensor:
        """The unreduced loss of a view with these settings."""
        return self.fn(*(view[name] for name in self.reads), **among(settings, self.fn))

    def total(
        self,
        plain: Mapping[str, Tensor],
        view: Mapping[str, Tensor],
        settings: Settings,
        count: Mapping[Average, Tensor],
    ) -> Tensor:
        """The contribution of these sequences to the loss: the weighted sum of each term / its count."""
        total = (
            weighted_sum(self.average, self(view, settings), view, settings) / count[self.average]
        )
        for average, modifier in self._terms(settings):
            values = modifier(plain, settings=settings)
            total = total + weighted_sum(average, values, plain, settings) / count[average]
        return total

    def rewards(self, view: Named, settings: Settings) -> Rewards | None:
        """Implicit rewards without gradient: of both sides of pairs [P] each, or of all [S].

        None if the loss has no implicit reward, or none of this view.
        """
        if self.reward is None or view.keys().isdisjoint(("logp", "logp_w")):
            return None
        ends = ("_w", "_l") if "logp_w" in view else ("",)
        rewards: list[Tensor] = []
        for end in ends:
            names = [name for name in ("logp", "ref", "teacher", "n") if f"{name}{end}" in view]
            sums = {name: view[f"{name}{end}"].detach() for name in names}
            sums["chosen"] = torch.full_like(sums["logp"], end == "_w", dtype=torch.bool)
            rewards.append(self.reward(sums, settings))
        return tuple(rewards)

    def measure(
        self,
        batch: MicroBatch,
        out: PolicyOutput,
        ref: Tensor | None,
        plain: Named,
        view: Named,
        settings: Settings,
    ) -> Metrics:
        """Metrics of a micro-batch. plain, view: as ``read`` returns them."""
        numbers = self.metrics(plain, self.rewards(view, settings), settings)
        for modifier in self.acting(None, settings):
            if modifier.metrics is not None:
                numbers |= modifier.metrics(token_columns(batch, out, ref) | plain, settings)
        return numbers


_UP_DOWN: Mapping[str, Direction] = {"chosen": 1, "rejected": -1}
# of losses that read sums over completions and a reference
_LONG = ("humanline", "ld_alpha", "edits", "wpo", "nll")
_NORM = ("humanline", "wpo", "nll")
_SOFT = ("smoothing",)
_F = ("f_divergence",)
_OF_TARGET = (
    ("clip", "target", "token"),
    ("max_ratio", "target", "token"),
    ("beta", "target", "distribution"),
    ("top_k", "target", "distribution"),
)
_SAMPLED = ("humanline", "correction", "kl_penalty")


def _row(fn: Callable[..., Tensor], modifiers: tuple[str, ...] = (), **fields: Any) -> Loss:
    base: dict[str, Any] = {"direction": _UP_DOWN, "modifiers": modifiers}
    return Loss(fn, **(base | fields))


# fmt: off
_TABLE: dict[str, Loss] = {
    "kto":               _row(unpaired.kto,               ("humanline",), statistic=stats.mismatched_kl, balances=stats.class_weights,
                              needs=(("desirable_weight", "class_weights", "given"), ("undesirable_weight", "class_weights", "given"))),
    "apo_zero_unpaired": _row(unpaired.apo_zero_unpaired, ("humanline",)),
    "bco":               _row(unpaired.bco,               ("humanline",), shifts=True),
    "aot_unpaired":      _row(coupled.aot_unpaired,       ("humanline",), average="class_mean", couples=True),
    "dpo":               _row(preference.dpo,        _LONG + _SOFT + _F),
    "dpo_norm":          _row(preference.dpo_norm,   _NORM + _SOFT + _F, reward=metrics.log_ratio_per_token),
    "robust_dpo":        _row(preference.robust_dpo, _LONG + _SOFT + _F),
    "ipo":               _row(preference.ipo,        _LONG + _F, reward=metrics.log_ratio_tau, clashes=(("normalize", True, "ld_alpha"), ("normalize", True, "edits"))),
    "hinge":             _row(preference.hinge,      _LONG + _F),
    "slic":              _row(preference.slic,       ("ld_alpha",), reward=metrics.unscaled_likelihood),
    "simpo":             _row(preference.simpo,      (*_SOFT, "nll"), reward=metrics.likelihood_per_token),
    "cpo":               _row(preference.cpo,        ("ld_alpha", "nll"), defaults={"nll_weight": 1.0}),
    "orpo":              _row(preference.orpo,       reward=metrics.likelihood_per_token),
    "apo_zero":          _row(preference.apo_zero,   _LONG),
    "apo_down":          _row(preference.apo_down,   _LONG, direction={"chosen": 0, "rejected": -1}),
    "exo":               _row(preference.exo,        _LONG + _SOFT + _F, defaults={"label_smoothing": 1e-3}),
    "nca":               _row(preference.nca,        _LONG),
    "bco_pair":          _row(preference.bco_pair,   _LONG, shifts=True),
    "sppo":              _row(preference.sppo,       _LONG),
    "dpop":              _row(preference.dpop,       _LONG, reward=metrics.log_ratio_penalized),
    "discopop":          _row(preference.discopop,   _LONG + _F, direction={"chosen": -1, "rejected": 1}),
    "aot":               _row(coupled.aot,           _LONG + _SOFT, couples=True),
    "bradley_terry":     _row(reward.bradley_terry),
    "pointwise":         _row(reward.pointwise, needs=(("huber_delta", "error", "huber"),)),
    "ordinal":           _row(reward.ordinal),
    "sft":               _row(imitation.sft, direction={"chosen": 1}),
    "dft":               _row(imitation.dft, direction={"chosen": 1}),
    "hindsight":         _row(distillation.from_teacher, average="seq_mean_token_mean", direction={"chosen": 1}, reward=metrics.signal, needs=_OF_TARGET),
    "distill":           _row(distillation.from_teacher, data="demonstration", direction={"chosen": 1}, reward=metrics.signal, needs=_OF_TARGET,
                              defaults={"target": "distribution"}),
    "grpo":              _row(policy.ppo_clip, _SAMPLED, average="seq_mean_token_mean", metrics=metrics.clipped_tokens),
    "dr_grpo":           _row(policy.ppo_clip, _SAMPLED, average="constant", metrics=metrics.clipped_tokens,
                              credit=advantage.above_group, advantage=advantage.of_group_centre),
    "dapo":              _row(policy.ppo_clip, _SAMPLED, metrics=metrics.clipped_tokens, defaults={"eps_high": 0.28}),
    "gspo":              _row(policy.gspo,     _SAMPLED, metrics=metrics.clipped_answers),
    "cispo":             _row(policy.cispo,    _SAMPLED, metrics=metrics.capped_tokens),
    "rloo":              _row(policy.rloo,     _SAMPLED, credit=advantage.above_others, advantage=advantage.of_leave_one_out),
    "reinforce_pp":      _row(policy.ppo_clip, _SAMPLED, metrics=metrics.clipped_tokens,
                              credit=advantage.over_step, advantage=advantage.of_reward_to_go),
    "ppo":               _row(policy.ppo_clip, (*_SAMPLED, "value"), metrics=metrics.clipped_tokens,
                              credit=advantage.over_step, advantage=advantage.gae),
}
# fmt: on
LOSSES: Mapping[str, Loss] = MappingProxyType(_TABLE)
"""The built-in losses, by method. Read-only: pass another loss as ``method``."""
