"""Losses that compare all rows of an optimizer step through their ranks, unreduced.

They are exact only on all rows of the step at once. Ties are broken by the order of the rows.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt

from valence.losses.lazy import Tensor, torch
from valence.losses.preference import Beta, logistic


def aot(
    logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, wrong: Tensor, *, beta: Beta = 0.1
) -> Tensor:
    """Alignment by optimal transport: raise the sorted differences of chosen and rejected
    completions above those of the reference.

    -(1-e) log s(beta*D) - e log s(-beta*D), D = sort(logp_w - logp_l) - sort(ref_w - ref_l), e =
    wrong. Melnyk et al. 2024, arXiv 2406.05882, Sec. 3 (paired). The k-th entry of D belongs to the
    pair with the k-th smallest logp_w - logp_l.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities of all pairs of the step (nats);
    wrong[P]: probability that the label is wrong.

    beta: regularization towards the reference.
    """
    gap = logp_w - logp_l
    rank = gap.argsort(stable=True).argsort()
    return logistic(beta * (gap - (ref_w - ref_l).sort().values[rank]), wrong)


def aot_unpaired(
    logp: Tensor, ref: Tensor, label: Tensor, *,
    beta: Beta = 0.1, label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
) -> Tensor:  # fmt: skip
    """Alignment by optimal transport without pairs: raise the sorted log-ratios of thumbs up above
    those of thumbs down.

    -(1-e) log s(beta*D) - e log s(-beta*D), D = sort(r of thumbs up) - sort(r of thumbs down), r =
    logp - ref. Of the larger class, k evenly spaced quantiles remain, k = size of the smaller one.
    Both completions of a sorted pair have half its loss, the dropped ones 0. Divide the sum over
    [S] by k. Melnyk et al. 2024, arXiv 2406.05882, Sec. 3 (unpaired).

    logp, ref [S]: summed log-probabilities of all completions of the step (nats); label[S]: True is
    thumbs up.

    beta: regularization towards the reference.
    label_smoothing: assumed share of wrong labels (e).
    """
    r = logp - ref
    ascending = r.argsort(stable=True)
    # thumbs up first, each class in ascending r
    order = ascending[(~label[ascending]).int().argsort(stable=True)]
    # The class sizes are on the device. To avoid blocking on it, there are as many ranks as rows,
    # of which k count.
    rank, ups = torch.arange(len(r), device=r.device), label.sum()
    downs = len(r) - ups
    k = torch.minimum(ups, downs)
    up, down = (
        order[_quantile(rank, ups, k)],
        order[(ups + _quantile(rank, downs, k)).clamp(max=len(r) - 1)],
    )
    half = logistic(beta * (r[up] - r[down]), label_smoothing).masked_fill(rank >= k, 0) / 2
    return torch.zeros_like(r).index_add(0, torch.cat([up, down]), torch.cat([half, half]))


def _quantile(rank: Tensor, rows: Tensor, k: Tensor) -> Tensor:
    """Indices of the midpoints of k equal shares of ``rows``: floor((i + 1/2)*rows/k), i < k."""
    return ((2 * rank + 1) * rows // (2 * k).clamp(min=1)).clamp(max=len(rank) - 1)
