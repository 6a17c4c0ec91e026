"""Losses that read a chosen and a rejected completion of one prompt.

All return the unreduced loss of each pair [P].

Notation: s is the sigmoid, r = logp - ref (nats), d = r_w - r_l, and ``wrong`` is the probability
that a label is wrong.
"""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Gt, Le

from valence.losses.lazy import Tensor, logsigmoid, torch

Beta = Annotated[float, Gt(0)]
Weight = Annotated[float, Ge(0)]


def logistic(x: Tensor, wrong: Tensor | float, margin: Tensor | float = 0.0) -> Tensor:
    """Logistic loss of a label that is wrong with probability e.

    -(1-e) log s(x - margin) - e log s(-x), e = wrong.
    """
    return -(1 - wrong) * logsigmoid(x - margin) - wrong * logsigmoid(-x)


def _gap(logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor) -> Tensor:
    """d = r_w - r_l [P]: the difference of the log-ratios (nats)."""
    return (logp_w - ref_w) - (logp_l - ref_l)


def dpo(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    margin: Tensor,
    wrong: Tensor,
    *,
    beta: Beta = 0.1,
) -> Tensor:
    """Direct preference optimization: raise the log-ratio of the chosen completion above that of
    the rejected one.

    -(1-e) log s(beta*d - margin) - e log s(-beta*d), e = wrong. Rafailov et al. 2023, arXiv
    2305.18290, Eq. 7; with e > 0 it is conservative DPO.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); margin[P]: required lead of
    the chosen completion (units of beta*d); wrong[P]: probability that the label is wrong.

    beta: regularization towards the reference.
    """
    return logistic(beta * _gap(logp_w, logp_l, ref_w, ref_l), wrong, margin)


def dpo_norm(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    n_w: Tensor,
    n_l: Tensor,
    margin: Tensor,
    wrong: Tensor,
    *,
    beta: Beta = 5.0,
) -> Tensor:
    """Length-normalized DPO: log-ratios are means over tokens, so that long completions do not
    dominate.

    -(1-e) log s(x - margin) - e log s(-x), x = beta*(r_w/n_w - r_l/n_l), e = wrong. Lambert et al.
    2024, arXiv 2411.15124.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); n_w, n_l [P]: tokens;
    margin[P]: units of x; wrong[P]: probability that the label is wrong.

    beta: regularization towards the reference; multiplies nats per token, so larger than for dpo.
    """
    return logistic(
        beta * _gap(logp_w / n_w, logp_l / n_l, ref_w / n_w, ref_l / n_l), wrong, margin
    )


def robust_dpo(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, wrong: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """DPO without bias from flipped labels: over random flips, the expected loss is the DPO loss of
    the true labels.

    (-(1-e) log s(beta*d) + e log s(-beta*d)) / (1-2e), e = wrong. Chowdhury et al. 2024, arXiv
    2403.00409, Sec. 3.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); wrong[P]: probability that
    the label is wrong; must not be 1/2, where the loss divides by 0.

    beta: regularization towards the reference.
    """
    x = beta * _gap(logp_w, logp_l, ref_w, ref_l)
    return (-(1 - wrong) * logsigmoid(x) + wrong * logsigmoid(-x)) / (1 - 2 * wrong)


def ipo(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    n_w: Tensor,
    n_l: Tensor,
    *,
    tau: Beta = 0.1,
    normalize: bool = True,
) -> Tensor:
    """Identity preference optimization: regress the difference of log-ratios to a fixed target,
    which limits it.

    (r_w/n_w - r_l/n_l - 1/(2*tau))^2, or (d - 1/(2*tau))^2 if not normalized. Azar et al. 2023,
    arXiv 2310.12036, Eq. 17.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); n_w, n_l [P]: tokens.

    tau: regularization towards the reference; the target difference is 1/(2*tau).
    normalize: means over tokens, as the authors used, instead of sums.
    """
    r_w, r_l = logp_w - ref_w, logp_l - ref_l
    gap = r_w / n_w - r_l / n_l if normalize else r_w - r_l
    return (gap - 1 / (2 * tau)).square()


def hinge(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    margin: Tensor,
    *,
    beta: Beta = 0.1,
) -> Tensor:
    """Hinge loss: a pair with a large enough difference of log-ratios has no gradient.

    max(0, 1 - (beta*d - margin)). Liu et al. 2023, arXiv 2309.06657 (hinge-norm; the case
    margin = 0).

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); margin[P]: units of beta*d.

    beta: pairs have no gradient above d = (1 + margin)/beta.
    """
    return torch.relu(1 + margin - beta * _gap(logp_w, logp_l, ref_w, ref_l))


def slic(
    logp_w: Tensor, logp_l: Tensor, *, margin: Weight = 1.0, nll_weight: Weight = 0.1
) -> Tensor:
    """Sequence likelihood calibration: make the chosen completion likelier than the rejected one by
    a margin, and keep it likely.

    max(0, margin - logp_w + logp_l) - nll_weight*logp_w. Zhao et al. 2023, arXiv 2305.10425, with
    the chosen completion as the regularizer's target.

    logp_w, logp_l [P]: summed log-probabilities (nats).

    margin: target difference of the log-probabilities, nats.
    nll_weight: weight of the chosen completion's negative log-likelihood.
    """
    return torch.relu(margin - logp_w + logp_l) - nll_weight * logp_w


def simpo(
    logp_w: Tensor,
    logp_l: Tensor,
    n_w: Tensor,
    n_l: Tensor,
    margin: Tensor,
    wrong: Tensor,
    *,
    beta: Beta = 2.0,
    gamma_beta_ratio: Weight = 0.5,
) -> Tensor:
    """Simple preference optimization: the reward is the mean log-probability, with a target margin
    gamma.

    -(1-e) log s(x - margin) - e log s(-x), x = beta*(logp_w/n_w - logp_l/n_l) - gamma, gamma =
    gamma_beta_ratio*beta, e = wrong. Meng et al. 2024, arXiv 2405.14734, Eq. 6 (the case
    margin = 0 and e = 0).

    logp_w, logp_l [P]: summed log-probabilities (nats); n_w, n_l [P]: tokens; margin[P]: units of
    x; wrong[P]: probability that the label is wrong.

    beta: scale of the reward; multiplies nats per token.
    gamma_beta_ratio: target difference of the mean log-probabilities (nats per token).
    """
    return logistic(beta * (logp_w / n_w - logp_l / n_l - gamma_beta_ratio), wrong, margin)


def cpo(logp_w: Tensor, logp_l: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """Contrastive preference optimization: DPO with a uniform reference, and the negative
    log-likelihood of the chosen completion.

    -log s(beta*(logp_w - logp_l)). Xu et al. 2024, arXiv 2401.08417. `nll_weight` adds the paper's
    other term.

    logp_w, logp_l [P]: summed log-probabilities (nats).

    beta: scale of the difference; larger: the loss saturates earlier.
    """
    return -logsigmoid(beta * (logp_w - logp_l))


def _log_odds(mean: Tensor) -> Tensor:
    """log(p/(1-p)) for log p = mean (nats), clamped to at most -1e-6, since p = 1 has infinite
    odds.
    """
    a = mean.clamp(max=-1e-6)
    return a - torch.where(a > -math.log(2), torch.log(-torch.expm1(a)), torch.log1p(-torch.exp(a)))


def orpo(logp_w: Tensor, logp_l: Tensor, n_w: Tensor, n_l: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """Odds-ratio preference optimization: imitate the chosen completion and raise its odds over
    those of the rejected one.

    -logp_w/n_w - beta*log s(o_w - o_l), o = a - log(1 - exp a), a = logp/n. Hong et al. 2024, arXiv
    2403.07691, Eq. 6-7.

    logp_w, logp_l [P]: summed log-probabilities (nats); n_w, n_l [P]: tokens.

    beta: weight of the odds-ratio term (lambda in the paper).
    """
    mean_w, mean_l = logp_w / n_w, logp_l / n_l
    return -mean_w - beta * logsigmoid(_log_odds(mean_w) - _log_odds(mean_l))


def apo_zero(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Anchored preference optimization: raise the chosen and lower the rejected completion, each
    relative to the reference.

    1 - s(beta*r_w) + s(beta*r_l). D'Oosterlinck et al. 2024, arXiv 2408.06266, Eq. 7.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats).

    beta: scale of the log-ratio; larger: the loss saturates earlier.
    """
    return torch.sigmoid(-beta * (logp_w - ref_w)) + torch.sigmoid(beta * (logp_l - ref_l))


def apo_down(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Anchored preference optimization for a policy that is better than its data: lower both
    completions, the rejected one further.

    s(beta*r_w) + 1 - s(beta*d). D'Oosterlinck et al. 2024, arXiv 2408.06266, Eq. 8.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats).

    beta: scale of the log-ratio; larger: the loss saturates earlier.
    """
    return torch.sigmoid(beta * (logp_w - ref_w)) + torch.sigmoid(
        -beta * _gap(logp_w, logp_l, ref_w, ref_l)
    )


def exo(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, wrong: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Efficient exact optimization: minimize the reverse KL between the policy's preference
    probability and the smoothed label.

    q (log q - log(1-e)) + (1-q) (log(1-q) - log e), q = s(beta*d), e = wrong. Ji et al. 2024, arXiv
    2402.00856, Eq. 16.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); wrong[P]: probability
    that the label is wrong, clamped to [1e-6, 1 - 1e-6], because the divergence is infinite at 0
    and 1.

    beta: regularization towards the reference.
    """
    x, e = beta * _gap(logp_w, logp_l, ref_w, ref_l), wrong.clamp(1e-6, 1 - 1e-6)
    agree = torch.sigmoid(x) * (logsigmoid(x) - torch.log1p(-e))
    return agree + torch.sigmoid(-x) * (logsigmoid(-x) - torch.log(e))


def nca(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Noise-contrastive alignment: classify the chosen completion against samples of the reference,
    so that it stays likely.

    -log s(beta*r_w) - 0.5 log s(-beta*r_w) - 0.5 log s(-beta*r_l). Chen et al. 2024, arXiv
    2402.05369, Sec. 4, for pairs.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats).

    beta: scale of the log-ratio; larger: the loss saturates earlier.
    """
    x_w, x_l = beta * (logp_w - ref_w), beta * (logp_l - ref_l)
    return -logsigmoid(x_w) - 0.5 * (logsigmoid(-x_w) + logsigmoid(-x_l))


def bco_pair(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, delta: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Binary classifier optimization on pairs: the implicit reward separates chosen and rejected
    completions at the threshold delta.

    -log s(beta*r_w - delta) - log s(-(beta*r_l - delta)). Jung et al. 2024, arXiv 2404.04656. The
    paper's weight is 1, because a pair has one prompt.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats); delta[]: running mean of the
    implicit rewards of chosen and rejected completions (units of beta*r), no gradient.

    beta: scale of the implicit reward.
    """
    return -logsigmoid(beta * (logp_w - ref_w) - delta) - logsigmoid(
        delta - beta * (logp_l - ref_l)
    )


def sppo(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Self-play preference optimization with hard labels: regress each log-ratio to a fixed target.

    (r_w - 1/(2*beta))^2 + (r_l + 1/(2*beta))^2. Wu et al. 2024, arXiv 2405.00675, with beta = 1/eta
    and win rates 1 and 0.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats).

    beta: regularization towards the reference; the targets are 1/(2*beta) and -1/(2*beta).
    """
    target = 1 / (2 * beta)
    return (logp_w - ref_w - target).square() + (logp_l - ref_l + target).square()


def dpop(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    *,
    beta: Beta = 0.1,
    penalty: Weight = 50.0,
) -> Tensor:
    """DPO-positive: DPO with a penalty if the chosen completion becomes less likely than under the
    reference.

    -log s(beta*(d - penalty*max(0, ref_w - logp_w))). Pal et al. 2024, arXiv 2402.13228, Sec. 4.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats).

    beta: regularization towards the reference.
    penalty: penalty per nat by which the chosen completion is less likely than under the reference.
    """
    return -logsigmoid(
        beta * (_gap(logp_w, logp_l, ref_w, ref_l) - penalty * torch.relu(ref_w - logp_w))
    )


def discopop(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    *,
    beta: Beta = 0.1,
    tau: Annotated[float, Gt(0), Le(1)] = 0.05,
) -> Tensor:
    """Log-ratio modulated loss, found by search: logistic for d < 0, exponential for d > 0.

    (1-m)*(-log s(x)) + m*exp(-x), x = beta*d, m = s(x/tau). Lu et al. 2024, arXiv 2406.08414, Eq.
    5. The loss is not convex: at d = 0, a small step makes the chosen completion less likely.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities (nats).

    beta: regularization towards the reference.
    tau: width of the transition between the forms (units of x); above 1 the slope would be
        unbounded.
    """
    x = beta * _gap(logp_w, logp_l, ref_w, ref_l)
    # m*exp(-x), whose factors overflow on their own
    exponential = torch.exp(logsigmoid(x / tau) - x)
    return -torch.sigmoid(-x / tau) * logsigmoid(x) + exponential
