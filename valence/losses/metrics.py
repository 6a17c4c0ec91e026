"""Numbers a loss reports about itself, as pure functions of its view: name -> value with its reduction.

``reward`` is the implicit reward of the loss: a function of summed log-probabilities (beta * (logp - ref) for most).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from valence.losses.policy import k3
from valence.types import Mean, Ranked

Metrics = dict[str, "Mean | Ranked"]
Sums = Mapping[str, Tensor]
Settings = Mapping[str, Any]
Reward = Callable[[Sums, Settings], Tensor]


def mean(values: Tensor) -> Mean:
    return Mean(values.sum(), values.new_full((), values.numel()))


def mean_of(values: Tensor, rows: Tensor) -> Mean:
    """Over the rows where ``rows`` is True: without picking them, as a device would have to say how many they are."""
    return Mean(values.masked_fill(~rows, 0).sum(), rows.sum())


# Implicit rewards. sums: logp, ref (nats), n (tokens).


def log_ratio(sums: Sums, settings: Settings) -> Tensor:
    """beta * (logp - ref): how much more likely (nats, scaled) the policy makes a completion than the reference does."""
    return settings["beta"] * (sums["logp"] - sums["ref"])


def log_ratio_tau(sums: Sums, settings: Settings) -> Tensor:
    """tau * (logp - ref)."""
    return settings["tau"] * (sums["logp"] - sums["ref"])


def log_ratio_per_token(sums: Sums, settings: Settings) -> Tensor:
    """beta * (logp - ref) / n."""
    return log_ratio(sums, settings) / sums["n"]


def likelihood(sums: Sums, settings: Settings) -> Tensor:
    """beta * logp, or logp where the loss has no beta."""
    return settings.get("beta", 1.0) * sums["logp"]


def likelihood_per_token(sums: Sums, settings: Settings) -> Tensor:
    """beta * logp / n."""
    return likelihood(sums, settings) / sums["n"]


# What is reported


def unpaired(view: Sums, reward: Reward, settings: Settings) -> Metrics:
    """Means over each class. An absent class has a count of zero and is left out of the log, never shown as 0."""
    up, sums = view["label"], _detached(view, "logp", "ref", "n")
    rewards = reward(sums, settings)
    numbers: Metrics = {}
    for name, rows in (("chosen", up), ("rejected", ~up)):
        numbers[f"rewards/{name}"] = mean_of(rewards, rows)
        numbers[f"logps/{name}"] = mean_of(sums["logp"], rows)
        numbers[f"logratio/{name}"] = mean_of(sums["logp"] - sums["ref"], rows)
    numbers["rewards/auc"] = Ranked(rewards, up)
    return numbers


def paired(view: Sums, reward: Reward, settings: Settings) -> Metrics:
    """Means over chosen and rejected, and the share of pairs whose chosen side has the larger reward (a tie counts half)."""
    numbers: Metrics = {}
    rewards: dict[str, Tensor] = {}
    for name, side in (("chosen", "w"), ("rejected", "l")):
        sums = {key: view[f"{key}_{side}"].detach() for key in ("logp", "ref", "n") if f"{key}_{side}" in view}
        rewards[name] = reward(sums, settings)
        numbers[f"rewards/{name}"] = mean(rewards[name])
        numbers[f"logps/{name}"] = mean(sums["logp"])
        if "ref" in sums:
            numbers[f"logratio/{name}"] = mean(sums["logp"] - sums["ref"])
    numbers["rewards/accuracies"] = mean(won(rewards["chosen"] - rewards["rejected"]))
    return numbers


def imitation(view: Sums, reward: Reward | None, settings: Settings) -> Metrics:
    """Mean log-probability of a demonstrated token (nats), and mean probability, which is what dft raises."""
    logp = view["logp_t"].detach()
    return {"logps/token": mean(logp), "probs/token": mean(logp.exp())}


def policy_gradient(view: Sums, reward: Reward | None, settings: Settings) -> Metrics:
    """Mean log-probability of a token (nats), its mean log-ratio to the policy that answered, plain and times the advantage (what
    a step raises), the divergence of that policy from this one, and of this one from the reference where that is a third (nats
    per token, k3), and the part of advantages above zero."""
    found = _detached(view, "logp_t", "old_t", "adv_t", "ref_t")
    d = found["logp_t"] - found["old_t"]
    numbers: Metrics = {
        "logps/token": mean(found["logp_t"]),
        "logratio/token": mean(d),
        "advantages/logratio": mean(found["adv_t"] * d),
        "advantages/positive": mean((found["adv_t"] > 0).to(d)),
        "kl/old": mean(k3(found["old_t"], found["logp_t"])),  # whose tokens they are
    }
    if "ref_t" in view and view["ref_t"] is not view["old_t"]:  # it stands in for the old policy of stored answers
        numbers["kl/reference"] = mean(k3(found["logp_t"], found["ref_t"]))
    return numbers


def clipped_tokens(view: Sums, reward: Reward | None, settings: Settings) -> Metrics:
    """Also the share of tokens whose ratio the clipping cut off, so that they are left alone."""
    ratio = (view["logp_t"].detach() - view["old_t"]).exp()
    return policy_gradient(view, reward, settings) | {"clipped": mean(_cut(ratio, view["adv_t"], settings))}


def clipped_answers(view: Sums, reward: Reward | None, settings: Settings) -> Metrics:
    """Also the share of answers whose ratio, the mean one of their tokens, the clipping cut off."""
    ratio = ((view["logp"].detach() - view["old"]) / view["n"]).exp()
    return policy_gradient(view, reward, settings) | {"clipped": mean(_cut(ratio, view["adv"], settings))}


def capped_tokens(view: Sums, reward: Reward | None, settings: Settings) -> Metrics:
    """Also the share of tokens whose ratio was capped, which count no more than it."""
    ratio = (view["logp_t"].detach() - view["old_t"]).exp()
    return policy_gradient(view, reward, settings) | {"clipped": mean((ratio > settings["eps_high"]).to(ratio))}


def _cut(ratio: Tensor, adv: Tensor, settings: Settings) -> Tensor:
    """1 where the ratio has left the interval in the direction of its advantage, or is beyond the dual clip, else 0."""
    cap = math.inf if settings["dual_clip"] is None else settings["dual_clip"]
    down = (ratio < 1 - settings["eps_low"]) | (ratio > cap)
    return (((adv > 0) & (ratio > 1 + settings["eps_high"])) | ((adv < 0) & down)).to(ratio)


def won(margin: Tensor) -> Tensor:
    """1 where the chosen side has the larger number, one half for a tie, else 0: [P]."""
    return (margin > 0).to(margin) + 0.5 * (margin == 0).to(margin)


def _detached(view: Sums, *names: str) -> dict[str, Tensor]:
    return {name: view[name].detach() for name in names if name in view}
