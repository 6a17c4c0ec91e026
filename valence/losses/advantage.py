"""Advantages: how much better a completion is than others, from its score or reward.

Methods that train on stored, scored completions have an advantage function of the signature
(score[S], group[S], moments[2]) in the table of losses (``credit``); moments are the mean and
standard deviation of the scores of the step. The functions of the field ``advantage`` are for all
completions that the policy has sampled in a round: their positional parameters are their inputs,
their keyword-only parameters settings of the method.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from valence.losses.lazy import Tensor, torch
from valence.losses.policy import k1

_FLOOR = 1e-4  # added to every standard deviation, so that equal scores divide by something
_MAX_ERROR = 0.2  # relative error of the KL beyond which the coefficient adapts no faster

KlBeta = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


def _places(group: Tensor) -> Tensor:
    """Consecutive numbers of the groups, below S: [S]. Does not block on the device."""
    order = group.argsort(stable=True)
    ordered = group[order]
    begins = torch.cat([(ordered[:1] != ordered[:1]).long(), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(order).index_copy(0, order, begins.cumsum(0))


def _compared(score: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R - mean_g [S], the number of each group [S], and the size of the group [S].

    Scores are taken relative to the lowest of their group, so that equal scores give exactly 0.
    """
    place = _places(group)
    blank = torch.zeros_like(score)
    count = blank.index_add(0, place, torch.ones_like(score))[place]
    above = score - torch.full_like(score, torch.inf).scatter_reduce(0, place, score, "amin")[place]
    return above - blank.index_add(0, place, above)[place] / count, place, count


def group_norm(score: Tensor, group: Tensor) -> Tensor:
    """Scores normalized within their group: (R - mean_g)/(std_g + 1e-4), sample standard deviation.

    Shao et al. 2024, arXiv 2402.03300, Sec. 4.1. Exactly 0 in a group of one and in a group of
    equal scores.

    score[S]: reward of each completion; group[S]: integer that completions of one prompt share.
    Returns [S], no unit.
    """
    centred, place, count = _compared(score, group)
    squares = torch.zeros_like(score).index_add(0, place, centred.square())[place]
    return centred / ((squares / (count - 1).clamp(min=1)).sqrt() + _FLOOR)


def group_centre(score: Tensor, group: Tensor) -> Tensor:
    """Scores minus the mean of their group: R - mean_g.

    Liu et al. 2025, arXiv 2503.20783. Exactly 0 in a group of one and in a group of equal scores.

    score[S]: reward of each completion; group[S]: integer that completions of one prompt share.
    Returns [S], units of reward.
    """
    return _compared(score, group)[0]


def leave_one_out(score: Tensor, group: Tensor) -> Tensor:
    """Scores minus the mean of the other G-1 in their group, G/(G-1) * (R - mean_g).

    Ahmadian et al. 2024, arXiv 2402.14740 (RLOO). Exactly 0 in a group of one and in a group of
    equal scores.

    score[S]: reward of each completion; group[S]: integer that completions of one prompt share.
    Returns [S], units of reward.
    """
    centred, _, count = _compared(score, group)
    return centred * count / (count - 1).clamp(min=1)


def whiten(score: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalize by the mean and standard deviation of a larger set: (score - mean)/(std + 1e-4).

    score[...]: any shape; mean[], std[]: unit of the score. Returns the shape of score, no unit.
    """
    return (score - mean) / (std + _FLOOR)


def whitened(values: Tensor) -> Tensor:
    """Values [N] normalized by their mean and population standard deviation; 0 if all are equal."""
    if not len(values):
        return values
    above = values - values.min()
    return whiten(above, above.mean(), above.std(correction=0))


def within_group(score: Tensor, group: Tensor, moments: Tensor) -> Tensor:
    """The score, normalized over the completions of the prompt: (R - mean_g)/(std_g + 1e-4).

    Shao et al. 2024, arXiv 2402.03300 (GRPO).
    """
    del moments
    return group_norm(score, group)


def above_group(score: Tensor, group: Tensor, moments: Tensor) -> Tensor:
    """The score minus the mean score of the prompt's completions: R - mean_g.

    Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO).
    """
    del moments
    return group_centre(score, group)


def above_others(score: Tensor, group: Tensor, moments: Tensor) -> Tensor:
    """The score minus the mean of the prompt's other completions.

    Ahmadian et al. 2024, arXiv 2402.14740 (RLOO).
    """
    del moments
    return leave_one_out(score, group)


def over_step(score: Tensor, group: Tensor, moments: Tensor) -> Tensor:
    """The score, normalized over all scores of the step: (R - mean)/(std + 1e-4)."""
    del group
    return whiten(score, *moments.to(score.dtype).unbind())


# Of a whole round: reward[S], group[S] (prompt of each completion), owner[N] (completion of each
# token, ascending), reward_t[N] (that of a turn at its last token; the sum over a completion is its
# reward), old_t[N], ref_t[N] (nats), value_t[N] (estimate before each token). All return adv_t[N].


def of_group_norm(reward: Tensor, group: Tensor, owner: Tensor) -> Tensor:
    """The reward, normalized over the completions of the prompt: A = (R - mean_g)/(std_g + 1e-4).

    Shao et al. 2024, arXiv 2402.03300, Sec. 4.1.
    """
    return group_norm(reward, group)[owner]


def of_group_centre(reward: Tensor, group: Tensor, owner: Tensor) -> Tensor:
    """The reward minus the mean reward of the prompt's completions: A = R - mean_g.

    Liu et al. 2025, arXiv 2503.20783.
    """
    return group_centre(reward, group)[owner]


def of_leave_one_out(
    reward: Tensor,
    group: Tensor,
    owner: Tensor,
    old_t: Tensor,
    ref_t: Tensor,
    *,
    kl_beta: KlBeta = 0.05,
) -> Tensor:
    """Reward minus KL penalty (R'), minus the mean R' of the prompt's other completions.

    A = R' - mean of R' over the other G-1, with R' = R - kl_beta*sum_t (old_t - ref_t). Ahmadian et
    al. 2024, arXiv 2402.14740.

    kl_beta: penalty per nat of KL from the reference (units of reward).
    """
    kl = torch.zeros_like(reward).index_add(0, owner, k1(old_t, ref_t).to(reward))
    return leave_one_out(reward - kl_beta * kl, group)[owner]


def of_reward_to_go(
    reward_t: Tensor, owner: Tensor, old_t: Tensor, ref_t: Tensor, *, kl_beta: KlBeta = 0.01
) -> Tensor:
    """Reward minus the KL penalty of the remaining tokens, normalized over the round's tokens.

    A_t = sum_{i>=t} (r_i - kl_beta*(old_i - ref_i)), then (A_t - mean)/(std + 1e-4) over the tokens
    of the round; r_i is the reward of a turn at its last token, 0 elsewhere. Hu 2025, arXiv
    2501.03262.

    kl_beta: penalty per nat of KL from the reference (units of reward).
    """
    reward, kl = _to_go(reward_t, owner), _to_go(k1(old_t, ref_t).to(reward_t), owner)
    return whitened(reward - kl_beta * kl)


def gae(
    reward_t: Tensor,
    owner: Tensor,
    old_t: Tensor,
    ref_t: Tensor,
    value_t: Tensor,
    *,
    kl_beta: KlBeta = 0.05,
    kl_target: Annotated[float, Gt(0)] | None = None,
    kl_horizon: Annotated[float, Gt(0)] = 10_000.0,
    gamma: Share = 1.0,
    gae_lambda: Share = 0.95,
) -> dict[str, Tensor]:
    """Generalized advantage estimation: the estimated return of a token minus the value estimate.

    d_t = r_t + gamma*V_{t+1} - V_t, A_t = d_t + gamma*gae_lambda*A_{t+1}, G_t = A_t + V_t; r_t =
    -kl_beta*(old_t - ref_t), plus the reward of a turn at its last token; V and A are 0 after the
    last token; then (A_t - mean)/(std + 1e-4) over the tokens of the round. Schulman et al. 2015,
    arXiv 1506.02438, Eq. 16; Ziegler et al. 2019, arXiv 1909.08593, Sec. 2.2. Here, r_t is the
    reward of a token and d_t its temporal-difference error. Truncated completions are treated like
    complete ones.

    Returns ``adv`` [N] (whitened) and ``return`` [N] (G_t, units of reward).

    kl_beta: penalty per nat of KL from the reference (units of reward); with kl_target, its first
        value.
    kl_target: target KL (nats per completion), for which kl_beta is adapted after every round.
        null: never.
    kl_horizon: completions over which kl_beta is adapted; more: slower.
    gamma: discount factor of rewards, per token.
    gae_lambda: how far the return estimate looks ahead: 0 to the next value, 1 to the end.
    """
    del kl_target, kl_horizon  # see adapted
    value, place = _laid_out(value_t.to(reward_t), owner)
    rewards, _ = _laid_out(reward_t - kl_beta * k1(old_t, ref_t).to(reward_t), owner)
    next_value = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)  # 0 from the end on
    delta = rewards + gamma * next_value - value
    advantages = torch.zeros_like(delta)
    next_advantage = delta.new_zeros(len(delta))
    for t in range(delta.shape[1] - 1, -1, -1):
        next_advantage = delta[:, t] + gamma * gae_lambda * next_advantage  # 0 after the last token
        advantages[:, t] = next_advantage
    adv = advantages[owner, place]
    return {"adv": whitened(adv), "return": adv + value_t.to(reward_t)}


def adapted(kl_beta: float, kl: float, target: float, horizon: float, count: int) -> float:
    """The KL coefficient after a round: larger if the KL exceeds the target.

    kl_beta * (1 + clip(kl/target - 1, -0.2, 0.2) * count/horizon). Ziegler et al. 2019, arXiv
    1909.08593, Sec. 2.2.

    kl: mean over the round's completions of sum_t (old_t - ref_t), nats. count: number of
        completions.
    """
    return kl_beta * (1 + min(max(kl / target - 1, -_MAX_ERROR), _MAX_ERROR) * count / horizon)


def _to_go(values: Tensor, owner: Tensor) -> Tensor:
    """The sum of the values of a token and those after it in its completion: [N]."""
    rows, place = _laid_out(values, owner)
    return rows.flip(1).cumsum(1).flip(1)[owner, place]


def _laid_out(values: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Token values [N] padded with zeros to [S, max length], and each token's position [N]."""
    counts = owner.bincount()  # of the tokens of each completion
    place = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    rows = values.new_zeros(len(counts), int(counts.max()) if len(counts) else 0)
    return rows.index_put((owner, place), values), place
