"""What may be added to a loss by a setting: other log-probabilities, other weights, or an
additional term.

The table defines which rows allow which modifier. A modifier's keyword-only parameters become
settings of those rows. ``tokens`` are changed before they are summed, a ``view`` after that; a
``term`` is added to the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from valence.losses import policy
from valence.losses.average import Average, among
from valence.losses.lazy import Tensor, logsigmoid, torch
from valence.losses.metrics import Metrics, Settings, mean
from valence.losses.views import Named, lengths, sides
from valence.types import MicroBatch, Ranked

Tokens = Mapping[str, Tensor]
Needs = tuple[tuple[str, str, Any], ...]
"""A setting, another setting, and the value of the other one that makes the first effective."""
Share = Annotated[float, Ge(0), Le(1)]
Low = Annotated[float, Lt(0)]
High = Annotated[float, Gt(0)]
MAX_NATS = 40.0  # exp(x)**2 of more would overflow in float32


def humanline(
    tokens: Tokens, batch: MicroBatch, *, humanline: tuple[Low, High] | None = None
) -> Named:
    """Clamp each token's log-ratio, because people do not perceive larger changes.

    d_t = clamp(logp_t - ref_t, low, high), r = sum_t d_t. Ethayarajh et al. 2025, arXiv 2509.24207.

    tokens: logp_t[N], ref_t[N] (nats).

    humanline: range [low, high] of a token's log-ratio (nats); [-1.0, 1.5] in the paper. Use it
        with reference.sync_every. After an update, log-ratios are 0 until the next step: on stored
        completions, reference.sync_every of 1 clamps nothing.
    """
    del batch
    assert humanline is not None
    return {
        **tokens,
        "logp_t": tokens["ref_t"] + (tokens["logp_t"] - tokens["ref_t"]).clamp(*humanline),
    }


def unclamped(tokens: Tokens, settings: Settings) -> Metrics:
    """The share of tokens whose log-ratio is inside the range of ``humanline``."""
    low, high = settings["humanline"]
    d = tokens["logp_t"].detach() - tokens["ref_t"]
    return {"humanline/unclamped": mean(((d >= low) & (d <= high)).to(d))}


def ld_alpha(tokens: Tokens, batch: MicroBatch, *, ld_alpha: Share = 1.0) -> Named:
    """Reduce the weight of tokens beyond the length of the pair's shorter completion, in policy and
    reference.

    Token t of a completion has the weight ld_alpha if t > min(n_w, n_l). Liu et al. 2024, arXiv
    2409.06411 (LD-DPO).

    tokens: logp_t[N], ref_t[N] (nats).

    ld_alpha: weight of tokens beyond the shorter completion; 1 changes nothing.
    """
    n = lengths(batch, tokens["logp_t"])
    chosen, rejected = sides(batch)
    shorter = torch.minimum(n[chosen], n[rejected])
    limit = n.index_put((torch.cat([chosen, rejected]),), torch.cat([shorter, shorter]))
    beyond = places(batch) >= limit[batch.sequence_ids[batch.scored]]
    weight = torch.ones_like(beyond, dtype=n.dtype).masked_fill(beyond, ld_alpha)
    return {
        **tokens,
        **{name: tokens[name] * weight for name in ("logp_t", "ref_t") if name in tokens},
    }


def edits(tokens: Tokens, batch: MicroBatch, *, shared_weight: Share = 1.0) -> Named:
    """Reduce the weight of tokens that both completions of a pair share, such as an answer and its
    correction, in policy and reference.

    Token t has the weight shared_weight if it is in a matching block of the token ids of both
    completions (Ratcliff and Metzener 1988, "Pattern Matching: The Gestalt Approach").

    tokens: logp_t[N], ref_t[N] (nats).

    shared_weight: weight of shared tokens; 1 changes nothing.
    """
    completions = batch.scored_tokens()
    is_shared: list[bool] = []
    for s in range(0, batch.sequences, 2):  # both completions of a pair follow each other
        for marks in shared_tokens(completions[s], completions[s + 1]):
            is_shared += marks
    mask = torch.empty(len(is_shared), dtype=torch.bool)
    mask[batch.cpu_scored[1].argsort(stable=True)] = torch.tensor(is_shared, dtype=torch.bool)
    logp = tokens["logp_t"]
    weight = torch.ones_like(logp).masked_fill(mask.to(logp.device), shared_weight)
    return {
        **tokens,
        **{name: tokens[name] * weight for name in ("logp_t", "ref_t") if name in tokens},
    }


@lru_cache(maxsize=4096)
def shared_tokens(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[list[bool], list[bool]]:
    """Whether each token of two completions is in a block that both have."""
    marks = [False] * len(first), [False] * len(second)
    for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        for side, start in zip(marks, (block.a, block.b), strict=True):
            side[start : start + block.size] = [True] * block.size
    return marks


def places(batch: MicroBatch) -> Tensor:
    """Number of scored tokens of the same sequence before each token: [N]."""
    owner = batch.cpu_scored[1]
    order = owner.argsort(stable=True)  # the rows of a sequence ascend
    counts = owner.bincount(minlength=batch.sequences)
    place = torch.empty_like(owner)
    place[order] = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[order]]
    return place.to(batch.sequence_ids.device)


def smoothing(view: Named, *, label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0) -> Named:
    """Set the probability that a label is wrong.

    wrong = 1 - soft, or wrong = label_smoothing for rows without soft.

    label_smoothing: assumed share of wrong labels, for rows without a column `soft`.
    """
    soft = view["soft"]
    return {**view, "wrong": (1 - soft).masked_fill(soft.isnan(), label_smoothing)}


def f_divergence(
    view: Named,
    *,
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl",
    f_alpha: Annotated[float, Gt(0), Lt(1)] = 0.5,
) -> Named:
    """Regularize with another f-divergence: replace the log-ratio r by f'(u), u = exp(r).

    forward_kl: 1 - exp(-r); js: log 2 + log s(r); alpha: (1 - exp(-a*r)) / a; reverse_kl: r.
    Wang et al. 2023, arXiv 2309.16240, Tab. 1. Exponents are clamped to 40 nats.

    view: logp_w, logp_l, ref_w, ref_l [P] (nats).

    f_divergence: divergence from the reference.
    f_alpha: a of `f_divergence: alpha`, between reverse KL (near 0) and forward KL (near 1).
    """

    def score(r: Tensor) -> Tensor:
        if f_divergence == "js":
            return math.log(2) + logsigmoid(r)
        power = 1.0 if f_divergence == "forward_kl" else f_alpha
        return -torch.expm1((-power * r).clamp(max=MAX_NATS)) / power

    ratios = {side: view[f"logp_{side}"] - view[f"ref_{side}"] for side in "wl"}
    scored = {f"logp_{side}": score(r) for side, r in ratios.items()}
    return {**view, **scored, **{f"ref_{side}": torch.zeros_like(r) for side, r in ratios.items()}}


def wpo(view: Named, *, wpo: bool = False) -> Named:
    """Weight a pair by the probability that the policy samples both completions.

    w = min(1, exp(c_w + c_l)), c = mean_t(logp_t - log sum_v p_v^2), without a gradient. Zhou et
    al. 2024, arXiv 2406.11827, Eq. 5, with the bound 1 of the authors' code. p_v: probability of
    token v of the vocabulary at t.

    view: confidence_w[P], confidence_l[P] (the c of both sides, nats).

    wpo: turn the weighting on.
    """
    del wpo
    confidence = view["confidence_w"] + view["confidence_l"]
    return {**view, "weight": view["weight"] * confidence.clamp(max=0).exp()}


def nll(
    view: Named,
    *,
    nll_weight: Annotated[float, Ge(0)] = 0.0,
    nll_average: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Add the negative log-likelihood of the chosen completion.

    token: nll_weight * sum(-logp_w) / number of chosen tokens of the step
    sequence: nll_weight * mean(-logp_w / n_w) over the pairs of the step.
    Pang et al. 2024, arXiv 2404.19733 (RPO), Eq. 1; Xu et al. 2024, arXiv 2401.08417 (CPO).

    view: logp_w[P] (nats), n_w[P] (tokens).

    nll_weight: weight of the chosen completion's negative log-likelihood.
    nll_average: `token`: over all chosen tokens of the step; `sequence`: over the tokens of each
        completion, then over completions.
    """
    loss = -nll_weight * view["logp_w"]
    return loss if nll_average == "token" else loss / view["n_w"]


def average_of_nll(settings: Settings) -> Average:
    return "chosen_token_mean" if settings["nll_average"] == "token" else "pair_mean"


def kl_penalty(
    view: Named,
    *,
    kl_weight: Annotated[float, Ge(0)] = 0.0,
    kl_estimator: Literal["k2", "k3"] = "k3",
) -> Tensor:
    """Add a per-token estimate of the KL from the reference, with the same averaging as the loss.

    kl_weight * k2 or k3 of logp_t - ref_t. Shao et al. 2024, arXiv 2402.03300, Eq. 4 (k3). Schulman
    2020, "Approximating KL divergence". k1, the log-ratio itself, is not available: its gradient
    averages to 0.

    view: logp_t[T], ref_t[T] (nats).

    kl_weight: weight of the KL from the reference.
    kl_estimator: k2 (half the squared log-ratio), with the gradient of KL(policy, reference) on the
        policy's own completions, or k3 (exp(x) - x - 1, x = ref - logp), with that of
        KL(reference, policy).
    """
    return kl_weight * {"k2": policy.k2, "k3": policy.k3}[kl_estimator](
        view["logp_t"], view["ref_t"]
    )


def correction(view: Named, *, correction: High | None = 2.0) -> Named:
    """Correct for differences between the sampler's and the policy's probabilities.

    weight * min(exp(old_t - sampler_t), correction), without a gradient. Losses of whole
    completions use the sums old and sampler. Ionides 2008 (truncated importance sampling).
    Needs the sampler's log-probabilities.

    view: old_t[T], sampler_t[T], or old[S], sampler[S] (nats).

    correction: largest weight; null: no correction.
    """
    assert correction is not None
    for end in ("", "_t"):
        if f"sampler{end}" in view:
            log_weight = (view[f"old{end}"] - view[f"sampler{end}"]).clamp(max=math.log(correction))
            return {**view, f"weight{end}": view[f"weight{end}"] * log_weight.exp()}
    return view


def corrected(tokens: Tokens, settings: Settings) -> Metrics:
    """KL(sampler || policy) in nats per token, and the share of weights capped at the limit."""
    if "sampler_t" not in tokens:
        return {}
    end = "" if "sampler" in tokens else "_t"
    over = tokens[f"old{end}"] - tokens[f"sampler{end}"] > math.log(settings["correction"])
    return {
        "sampler/kl": mean(tokens["sampler_t"] - tokens["old_t"]),
        "sampler/truncated": mean(over.to(tokens["old_t"])),
    }


def value(
    view: Named,
    *,
    value: bool = False,
    value_weight: Annotated[float, Ge(0)] = 0.1,
    value_clip: High | None = 0.2,
) -> Tensor:
    """Add the per-token error of the value head, with the same averaging as the loss.

    value_weight * 0.5*max((V - G)^2, (clip(V, V_old +- value_clip) - G)^2), V_old = V at sampling.
    Schulman et al. 2017, arXiv 1707.06347, Eq. 9, clipped as in its published code. The term is 0
    without a return G, as for stored completions.

    view: critic_t[T] (V), value_t[T] (V_old), return_t[T] (G), units of reward.

    value: train a value head. ppo with a reward always trains one.
    value_weight: weight of the error.
    value_clip: largest change of an estimate since sampling, no gradient beyond. null: no limit.
    """
    del value
    if "return_t" not in view:
        return torch.zeros_like(view["logp_t"])
    return value_weight * _value_error(view, value_clip)


def _value_error(view: Tokens, clip: float | None) -> Tensor:
    error = (view["critic_t"] - view["return_t"]).square()
    if clip is not None:
        near = view["value_t"] + (view["critic_t"] - view["value_t"]).clamp(-clip, clip)
        error = torch.maximum(error, (near - view["return_t"]).square())
    return 0.5 * error


def valued(tokens: Tokens, settings: Settings) -> Metrics:
    """Loss of the value head, its mean estimate, and the explained variance of the returns."""
    if "return_t" not in tokens:
        return {}
    detached = {name: values.detach() for name, values in tokens.items()}
    return {
        "value/loss": mean(_value_error(detached, settings["value_clip"])),
        "value/mean": mean(detached["critic_t"]),
        "value/explained": Ranked(detached["critic_t"], detached["return_t"], "explained"),
    }


@dataclass(frozen=True, slots=True)
class Modifier:
    """A change of the inputs of a loss, or a term that is added to it.

    idle: the setting that turns it on, and the value that turns it off. wants: outputs that the
    policy model computes for it. average: of a term (None: that of the loss, over tokens).
    metrics: additional metrics of the unmodified inputs. refers: whether it reads the reference.
    """

    fn: Callable[..., Any]
    stage: Literal["tokens", "view", "term"]
    idle: tuple[str, Any]
    wants: tuple[str, ...] = ()
    average: Callable[[Settings], Average] | None = None
    metrics: Callable[[Tokens, Settings], Metrics] | None = None
    needs: Needs = ()
    refers: bool = False

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.fn, eval_str=True).parameters.values()
        return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}

    def acts(self, settings: Settings) -> bool:
        return settings[self.idle[0]] != self.idle[1]

    def __call__(self, *inputs: Any, settings: Settings) -> Any:
        return self.fn(*inputs, **among(settings, self.fn))


MODIFIERS: dict[str, Modifier] = {
    "humanline": Modifier(humanline, "tokens", ("humanline", None), metrics=unclamped, refers=True),
    "ld_alpha": Modifier(ld_alpha, "tokens", ("ld_alpha", 1.0)),
    "edits": Modifier(edits, "tokens", ("shared_weight", 1.0)),
    # which it never is: rows may say more than the setting
    "smoothing": Modifier(smoothing, "view", ("label_smoothing", None)),
    "f_divergence": Modifier(
        f_divergence,
        "view",
        ("f_divergence", "reverse_kl"),
        needs=(("f_alpha", "f_divergence", "alpha"),),
    ),
    "wpo": Modifier(wpo, "view", ("wpo", False), wants=("sum_sq",)),
    "nll": Modifier(nll, "term", ("nll_weight", 0.0), average=average_of_nll),
    "kl_penalty": Modifier(kl_penalty, "term", ("kl_weight", 0.0), refers=True),
    "correction": Modifier(correction, "view", ("correction", None), metrics=corrected),
    "value": Modifier(value, "term", ("value", False), wants=("value",), metrics=valued),
}
