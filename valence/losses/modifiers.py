"""What may be added to a loss by a setting: other log-probabilities, other weights, or a term of its own.

Which rows of the table allow which is said there. A modifier's keyword-only parameters become settings of those rows.
``tokens`` are changed before they are summed, a ``view`` after that; a ``term`` is added to the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from torch.nn.functional import logsigmoid

from valence.losses import policy
from valence.losses.average import Average
from valence.losses.metrics import Metrics, Settings, mean
from valence.losses.views import Named, lengths, sides
from valence.types import Batch

Tokens = Mapping[str, Tensor]
Needs = tuple[tuple[str, str, Any], ...]
"""Each a setting, another one, and the value of that without which it is not read."""
Share = Annotated[float, Ge(0), Le(1)]
Low = Annotated[float, Lt(0)]
High = Annotated[float, Gt(0)]
MOST = 40.0  # nats; the square of e to more of them would be infinite in float32


def humanline(tokens: Tokens, batch: Batch, *, humanline: tuple[Low, High] | None = None) -> Named:
    """Clamps each token's log-ratio, beyond which it has no gradient: people do not perceive more.

    d_t = clamp(logp_t - ref_t, low, high), r = sum_t d_t. Ethayarajh et al. 2025, arXiv 2509.24207.

    tokens: logp_t[N], ref_t[N] (nats).

    humanline: the range [low, high] of a token's log-ratio (nats), with 0 inside it, published as [-1.0, 1.5]; null for no
        clamping. Goes with reference.sync_every.
    """
    del batch
    assert humanline is not None
    return {**tokens, "logp_t": tokens["ref_t"] + (tokens["logp_t"] - tokens["ref_t"]).clamp(*humanline)}


def unclamped(tokens: Tokens, settings: Settings) -> Metrics:
    """The share of tokens whose log-ratio lies inside the range of ``humanline``."""
    low, high = settings["humanline"]
    d = tokens["logp_t"].detach() - tokens["ref_t"]
    return {"humanline/unclamped": mean(((d >= low) & (d <= high)).to(d))}


def ld_alpha(tokens: Tokens, batch: Batch, *, ld_alpha: Share = 1.0) -> Named:
    """Counts the tokens by which one answer is longer than the other for less, in policy and reference alike.

    Token t of an answer counts alpha times where t > min(n_w, n_l). Liu et al. 2024, arXiv 2409.06411 (LD-DPO).

    tokens: logp_t[N], ref_t[N] (nats).

    ld_alpha: what a token beyond the length of the shorter answer counts; 1 changes nothing.
    """
    n = lengths(batch, tokens["logp_t"])
    chosen, rejected = sides(batch)
    shorter = torch.minimum(n[chosen], n[rejected])
    limit = n.index_put((torch.cat([chosen, rejected]),), torch.cat([shorter, shorter]))
    beyond = places(batch) >= limit[batch.seq[batch.scored]]
    weight = torch.ones_like(beyond, dtype=n.dtype).masked_fill(beyond, ld_alpha)
    return {**tokens, **{name: tokens[name] * weight for name in ("logp_t", "ref_t") if name in tokens}}


def places(batch: Batch) -> Tensor:
    """How many tokens of its own sequence are read before each token: [N]."""
    owner = batch.read[1]
    order = owner.argsort(stable=True)  # the rows of a sequence ascend
    counts = owner.bincount(minlength=batch.sequences)
    place = torch.empty_like(owner)
    place[order] = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[order]]
    return place.to(batch.seq.device)


def smoothing(view: Named, *, label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0) -> Named:
    """The probability that a verdict is wrong: what the row says of its own (1 - soft), else the setting.

    wrong[P] = 1 - soft, or e = label_smoothing.

    label_smoothing: assumed share of pairs whose verdict is wrong, where a row does not say it by its column `soft`.
    """
    soft = view["soft"]
    return {**view, "wrong": (1 - soft).masked_fill(soft.isnan(), label_smoothing)}


def f_divergence(
    view: Named,
    *,
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl",
    f_alpha: Annotated[float, Gt(0), Lt(1)] = 0.5,
) -> Named:
    """Keeps the policy near the reference by another divergence: a score of the log-ratio stands in its place.

    forward_kl: 1 - exp(-r); js: log 2 + log s(r); alpha: (exp((a-1) r) - 1) / (a-1); reverse_kl: r.
    Wang et al. 2023, arXiv 2309.16240. Exponents are cut at 40 nats.

    view: logp_w, logp_l, ref_w, ref_l [P] (nats).

    f_divergence: the divergence from the reference that the loss implies.
    f_alpha: the exponent of `f_divergence: alpha`, between forward (towards 0) and reverse KL (towards 1).
    """

    def score(r: Tensor) -> Tensor:
        if f_divergence == "js":
            return math.log(2) + logsigmoid(r)
        power = 1.0 if f_divergence == "forward_kl" else 1 - f_alpha
        return -torch.expm1((-power * r).clamp(max=MOST)) / power

    ratios = {side: view[f"logp_{side}"] - view[f"ref_{side}"] for side in "wl"}
    scored = {f"logp_{side}": score(r) for side, r in ratios.items()}
    return {**view, **scored, **{f"ref_{side}": torch.zeros_like(r) for side, r in ratios.items()}}


def wpo(view: Named, *, wpo: bool = False) -> Named:
    """Weighs a pair by how likely the policy itself is to give such answers, as if they had been sampled from it.

    w = exp(c_w + c_l), c = mean_t(logp_t - log sum_v p_v^2), without a gradient. Zhou et al. 2024, arXiv 2406.11827, Eq. 5.

    view: confidence_w[P], confidence_l[P] (the c of both sides, nats).

    wpo: weigh pairs in this way.
    """
    del wpo
    return {**view, "weight": view["weight"] * (view["confidence_w"] + view["confidence_l"]).exp()}


def nll(view: Named, *, nll_weight: Annotated[float, Ge(0)] = 0.0, nll_average: Literal["token", "sequence"] = "token") -> Tensor:
    """Adds the negative log-likelihood of the chosen answer.

    nll_weight * -logp_w over all chosen tokens of the step (token), or nll_weight * -logp_w / n_w over its pairs (sequence).
    Pang et al. 2024, arXiv 2404.19733 (RPO), Eq. 1; Xu et al. 2024, arXiv 2401.08417 (CPO).

    view: logp_w[P] (nats), n_w[P] (tokens).

    nll_weight: weight of the chosen answer's negative log-likelihood.
    nll_average: over what it is a mean: all chosen tokens of the step, or the answers, each of which is a mean over its tokens.
    """
    loss = -nll_weight * view["logp_w"]
    return loss if nll_average == "token" else loss / view["n_w"]


def average_of_nll(settings: Settings) -> Average:
    return "chosen_token_mean" if settings["nll_average"] == "token" else "pair_mean"


def kl_penalty(view: Named, *, kl_weight: Annotated[float, Ge(0)] = 0.0, kl_estimator: Literal["k2", "k3"] = "k3") -> Tensor:
    """Adds an estimate of the divergence from the reference, token by token, averaged as the loss is.

    kl_weight * k2 or k3 of logp_t - ref_t. Shao et al. 2024, arXiv 2402.03300, Eq. 4 (k3). Schulman 2020, "Approximating KL
    divergence". k1 is not offered: as a loss its gradient averages to nothing.

    view: logp_t[T], ref_t[T] (nats).

    kl_weight: weight of the divergence from the reference.
    kl_estimator: k2 (half the squared log-ratio), or k3 (exp(x) - x - 1, x = ref - logp), which follows KL(reference, policy).
    """
    return kl_weight * {"k2": policy.k2, "k3": policy.k3}[kl_estimator](view["logp_t"], view["ref_t"])


@dataclass(frozen=True, slots=True)
class Modifier:
    """All that a loss is to know of one. ``idle``: the setting that turns it on, and its value at which nothing is changed.

    wants: what the engine is to tell besides log-probabilities. average: of a term (None: that of the loss). metrics: more
    numbers to report, of the tokens as they were measured.
    """

    fn: Callable[..., Any]
    stage: Literal["tokens", "view", "term"]
    idle: tuple[str, Any]
    wants: tuple[str, ...] = ()
    average: Callable[[Settings], Average] | None = None
    metrics: Callable[[Tokens, Settings], Metrics] | None = None
    needs: Needs = ()

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.fn, eval_str=True).parameters.values()
        return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}

    def acts(self, settings: Settings) -> bool:
        return settings[self.idle[0]] != self.idle[1]

    def __call__(self, *given: Any, settings: Settings) -> Any:
        return self.fn(*given, **{name: settings[name] for name in self.settings})


MODIFIERS: dict[str, Modifier] = {
    "humanline": Modifier(humanline, "tokens", ("humanline", None), metrics=unclamped),
    "ld_alpha": Modifier(ld_alpha, "tokens", ("ld_alpha", 1.0)),
    "smoothing": Modifier(smoothing, "view", ("label_smoothing", None)),  # which it never is: rows may say more than the setting
    "f_divergence": Modifier(f_divergence, "view", ("f_divergence", "reverse_kl"), needs=(("f_alpha", "f_divergence", "alpha"),)),
    "wpo": Modifier(wpo, "view", ("wpo", False), wants=("sum_sq",)),
    "nll": Modifier(nll, "term", ("nll_weight", 0.0), average=average_of_nll),
    "kl_penalty": Modifier(kl_penalty, "term", ("kl_weight", 0.0)),
}
