"""Numbers a loss reports about itself, as pure functions of its view: name -> value with its reduction.

``reward`` is the implicit reward of the loss, a function of summed log-probabilities (beta * (logp - ref) for most).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from valence.types import Mean, Ranked

Metrics = dict[str, "Mean | Ranked"]
Reward = Callable[..., Tensor]


def _mean(values: Tensor) -> Mean:
    return Mean(values.sum(), values.new_tensor(values.numel()))


def _mean_of(values: Tensor, rows: Tensor) -> Mean:
    """Over the rows where ``rows`` is True: without picking them, as a device would have to say how many they are."""
    return Mean(values.masked_fill(~rows, 0).sum(), rows.sum())


def log_ratio_reward(logp: Tensor, ref: Tensor, *, beta: float, **_: Any) -> Tensor:
    """beta * (logp - ref): how much more likely (nats, scaled) the policy makes a completion than the reference does."""
    return beta * (logp - ref)


def unpaired(view: dict[str, Tensor], reward: Reward, settings: dict[str, Any]) -> Metrics:
    """Means over each class. An absent class has a count of zero and is left out of the log, never shown as 0."""
    up = view["label"]
    rewards = reward(view["logp"], view["ref"], **settings).detach()
    numbers: Metrics = {}
    for name, rows in (("chosen", up), ("rejected", ~up)):
        numbers[f"rewards/{name}"] = _mean_of(rewards, rows)
        numbers[f"logps/{name}"] = _mean_of(view["logp"].detach(), rows)
        numbers[f"logratio/{name}"] = _mean_of((view["logp"] - view["ref"]).detach(), rows)
    numbers["rewards/auc"] = Ranked(rewards, up)
    return numbers


def paired(view: dict[str, Tensor], reward: Reward, settings: dict[str, Any]) -> Metrics:
    """Means over chosen and rejected, and the share of pairs whose chosen side has the larger reward (a tie counts half)."""
    numbers: Metrics = {}
    rewards: dict[str, Tensor] = {}
    for name, side in (("chosen", "w"), ("rejected", "l")):
        logp, ref = view[f"logp_{side}"].detach(), view[f"ref_{side}"]
        rewards[name] = reward(logp, ref, **settings)
        numbers[f"rewards/{name}"] = _mean(rewards[name])
        numbers[f"logps/{name}"] = _mean(logp)
        numbers[f"logratio/{name}"] = _mean(logp - ref)
    margin = rewards["chosen"] - rewards["rejected"]
    numbers["rewards/accuracies"] = _mean((margin > 0).to(margin) + 0.5 * (margin == 0).to(margin))
    return numbers


def imitation(view: dict[str, Tensor], reward: Reward | None, settings: dict[str, Any]) -> Metrics:
    """Mean log-probability of a demonstrated token (nats)."""
    return {"logps/token": _mean(view["logp_t"].detach())}
