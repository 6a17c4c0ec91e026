"""Metrics of a loss, as pure functions of its view: name -> value with its reduction.

The implicit reward is a function of summed log-probabilities, usually beta * (logp - ref).
It is computed from the inputs of the loss, after its modifiers, so that ``rewards/*`` show what the
loss optimizes; ``logps/*`` and ``logratio/*`` are unmodified sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from valence.losses.lazy import Tensor
from valence.losses.policy import k3
from valence.types import Mean, Ranked

Metrics = dict[str, "Mean | Ranked"]
Sums = Mapping[str, Tensor]
Settings = Mapping[str, Any]
Reward = Callable[[Sums, Settings], Tensor]
Rewards = tuple[Tensor, ...]
"""Implicit rewards: of the chosen and of the rejected completions [P] each, or of all [S]."""


def mean(values: Tensor) -> Mean:
    return Mean(values.sum(), values.new_full((), values.numel()))


def mean_of(values: Tensor, rows: Tensor) -> Mean:
    """Mean over the rows where ``rows`` is True, by masking: indexing would block on the device."""
    return Mean(values.masked_fill(~rows, 0).sum(), rows.sum())


# Implicit rewards. sums: logp, ref (nats), n (tokens), chosen (of pairs: whether it is that side).


def log_ratio(sums: Sums, settings: Settings) -> Tensor:
    """beta * (logp - ref)."""
    # a user's loss may have no setting of this name
    return settings.get("beta", 1.0) * (sums["logp"] - sums["ref"])


def log_ratio_tau(sums: Sums, settings: Settings) -> Tensor:
    """tau * (logp - ref) / n, or tau * (logp - ref) if normalize is false."""
    ratio = settings["tau"] * (sums["logp"] - sums["ref"])
    return ratio / sums["n"] if settings["normalize"] else ratio


def log_ratio_penalized(sums: Sums, settings: Settings) -> Tensor:
    """beta * (logp - ref) - beta * penalty * max(0, ref - logp) on the chosen side."""
    ratio = sums["logp"] - sums["ref"]
    penalty = settings["penalty"] * (-ratio).clamp(min=0)
    return settings["beta"] * (ratio - penalty * sums["chosen"].to(ratio))


def log_ratio_per_token(sums: Sums, settings: Settings) -> Tensor:
    """beta * (logp - ref) / n."""
    return log_ratio(sums, settings) / sums["n"]


def likelihood(sums: Sums, settings: Settings) -> Tensor:
    """beta * logp."""
    return settings.get("beta", 1.0) * sums["logp"]


def unscaled_likelihood(sums: Sums, settings: Settings) -> Tensor:
    """logp."""
    return sums["logp"]


def likelihood_per_token(sums: Sums, settings: Settings) -> Tensor:
    """beta * logp / n."""
    return likelihood(sums, settings) / sums["n"]


def signal(sums: Sums, settings: Settings) -> Tensor:
    """(teacher - logp) / n: how much more likely the teacher finds a token of the completion."""
    return (sums["teacher"] - sums["logp"]) / sums["n"]


# Metrics


def unpaired(view: Sums, rewards: Rewards, settings: Settings) -> Metrics:
    """Means over each class, and the AUC. A class without rows is left out of the log."""
    up, sums = view["label"], _detached(view, "logp", "ref")
    (reward,) = rewards
    numbers: Metrics = {}
    for name, rows in (("chosen", up), ("rejected", ~up)):
        numbers[f"rewards/{name}"] = mean_of(reward, rows)
        numbers[f"logps/{name}"] = mean_of(sums["logp"], rows)
        if "ref" in sums:
            numbers[f"logratio/{name}"] = mean_of(sums["logp"] - sums["ref"], rows)
    numbers["rewards/auc"] = Ranked(reward, up)
    return numbers


def paired(view: Sums, rewards: Rewards, settings: Settings) -> Metrics:
    """Means of both sides, and the accuracy: the chosen side has the larger reward (ties half)."""
    numbers: Metrics = {}
    chosen, rejected = rewards
    for name, side, reward in (("chosen", "w", chosen), ("rejected", "l", rejected)):
        logp = view[f"logp_{side}"].detach()
        numbers[f"rewards/{name}"] = mean(reward)
        numbers[f"logps/{name}"] = mean(logp)
        if f"ref_{side}" in view:
            numbers[f"logratio/{name}"] = mean(logp - view[f"ref_{side}"])
    numbers["rewards/accuracies"] = mean(won(chosen - rejected))
    return numbers


def none(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """No metrics but the loss."""
    del view, rewards, settings
    return {}


def imitation(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """Mean log-probability (nats) and mean probability of demonstrated tokens; dft raises the
    latter.
    """
    logp = view["logp_t"].detach()
    return {"logps/token": mean(logp), "probs/token": mean(logp.exp())}


def distillation(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """The signal of the teacher, log p_teacher - logp (nats per token): its mean, its mean absolute
    value, and the share of tokens where it is clipped. With the mean log-probability.
    """
    logp = view["logp_t"].detach()
    signal, limit = view["teacher_t"] - logp, settings.get("clip")
    numbers: Metrics = {
        "logps/token": mean(logp),
        "signal/mean": mean(signal),
        "signal/size": mean(signal.abs()),
    }
    if limit is not None and settings.get("target", "token") == "token":
        numbers["signal/clipped"] = mean((signal.abs() > limit).to(signal))
    return numbers


def policy_gradient(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """Metrics of policy-gradient losses, means over tokens.

    Log-probability and log-ratio to the sampling policy (nats), the log-ratio times the advantage,
    the share of positive advantages, and KL to the sampling policy and to the reference (k3).
    """
    detached = _detached(view, "logp_t", "old_t", "adv_t", "ref_t")
    d = detached["logp_t"] - detached["old_t"]
    numbers: Metrics = {
        "logps/token": mean(detached["logp_t"]),
        "logratio/token": mean(d),
        "advantages/logratio": mean(detached["adv_t"] * d),
        "advantages/positive": mean((detached["adv_t"] > 0).to(d)),
        "kl/old": mean(k3(detached["old_t"], detached["logp_t"])),  # the tokens are those of old
    }
    # for stored completions, the reference is used as the old policy
    if "ref_t" in view and view["ref_t"] is not view["old_t"]:
        numbers["kl/reference"] = mean(k3(detached["logp_t"], detached["ref_t"]))
    return numbers


def clipped_tokens(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """Adds the share of clipped tokens, which have no gradient."""
    ratio = (view["logp_t"].detach() - view["old_t"]).exp()
    return policy_gradient(view, rewards, settings) | {
        "clipped": mean(_is_clipped(ratio, view["adv_t"], settings))
    }


def clipped_answers(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """Adds the share of clipped completions."""
    ratio = ((view["logp"].detach() - view["old"]) / view["n"]).exp()
    return policy_gradient(view, rewards, settings) | {
        "clipped": mean(_is_clipped(ratio, view["adv"], settings))
    }


def capped_tokens(view: Sums, rewards: Rewards | None, settings: Settings) -> Metrics:
    """Adds the share of tokens whose ratio is capped."""
    ratio = (view["logp_t"].detach() - view["old_t"]).exp()
    return policy_gradient(view, rewards, settings) | {
        "clipped": mean((ratio > settings["eps_high"]).to(ratio))
    }


def _is_clipped(ratio: Tensor, adv: Tensor, settings: Settings) -> Tensor:
    """1 if the ratio is outside the clipping interval in the direction of its advantage, else 0."""
    cap = math.inf if settings["dual_clip"] is None else settings["dual_clip"]
    down = (ratio < 1 - settings["eps_low"]) | (ratio > cap)
    return (((adv > 0) & (ratio > 1 + settings["eps_high"])) | ((adv < 0) & down)).to(ratio)


def won(margin: Tensor) -> Tensor:
    """1 if the chosen side has the larger value, 0.5 for a tie, else 0: [P]."""
    return (margin > 0).to(margin) + 0.5 * (margin == 0).to(margin)


def _detached(view: Sums, *names: str) -> dict[str, Tensor]:
    return {name: view[name].detach() for name in names if name in view}
