"""Statistics of a whole optimizer step that losses need before the first gradient, and running
statistics over steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from typing_extensions import TypedDict  # pydantic reads this one on Python 3.11

from valence.losses.lazy import Tensor, torch
from valence.losses.views import sum_by_index


class GroupScope(TypedDict):
    """Reference points as in published systems: one per ``group`` consecutive examples of a step,
    paired cyclically.
    """

    group: Annotated[int, Ge(2)]  # a group of one would pair a row with itself
    pairing: Literal["next", "previous", "reversed"]


def mismatched_kl(
    logp: Tensor,
    ref: Tensor,
    group: Tensor,
    groups: int,
    *,
    z0_scope: Literal["step"] | GroupScope = "step",
) -> Tensor:
    """Sums and counts of logp - ref over mismatched completions: [2, groups].

    Add them up over micro-batches and processes.

    logp[S], ref[S]: summed log-probabilities of a completion after a mismatched prompt (nats);
    group[S]: index of the reference point that a sequence counts towards.

    z0_scope: step (one reference point for the whole optimizer step, over all processes), or
        {group: N, pairing: next | previous | reversed} (one per N examples in step order) to
        reproduce runs of other systems.
    """
    del z0_scope  # sequences were grouped and paired by it before
    return sum_by_index(torch.stack([(logp - ref).detach(), torch.ones_like(logp)]), group, groups)


def reference_point(sums: Tensor) -> tuple[Tensor, Tensor]:
    """z0 = max(0, sum/count) of each group, and the same without the clamp: both [groups], in nats.

    arXiv 2402.01306, Sec. 4.1. Clamp only after adding the sums of all micro-batches and
    processes: the mean of clamped means is biased upward.
    """
    raw = sums[0] / sums[1]
    return raw.clamp(min=0), raw


def class_weights(
    n_up: int, n_down: int, *, class_weights: Literal["given", "auto"] = "given"
) -> tuple[float, float]:
    """Weights (desirable, undesirable) that balance both classes by raising the smaller one.

    (desirable_weight * n_up) / (undesirable_weight * n_down) = 1. arXiv 2402.01306, Sec. 4.2,
    advises 1 to 4/3.

    n_up, n_down: examples of each class. If one is 0, both weights are 1.

    class_weights: given (use desirable_weight and undesirable_weight), or auto (raise the weight of
        the smaller class to balance both).
    """
    del class_weights  # read by the caller
    if not n_up or not n_down:
        return 1.0, 1.0
    return max(1.0, n_down / n_up), max(1.0, n_up / n_down)


def powers(scores: Tensor) -> Tensor:
    """Count, sum and sum of squares of scores[S]: [3]. Add them up over processes."""
    return torch.stack([scores.new_full((), scores.numel()), scores.sum(), (scores * scores).sum()])


def moments(powers: Tensor) -> Tensor:
    """Mean and population standard deviation: [2]."""
    n, total, squares = powers
    mean = total / n
    return torch.stack([mean, (squares / n - mean * mean).clamp(min=0).sqrt()])


def class_sums(view: Mapping[str, Tensor]) -> Tensor:
    """Sums of logp - ref (nats) and counts of both classes, or sides of pairs: [2, 2].

    Add them up over micro-batches and processes.
    """
    if "label" in view:
        ratios, up = (view["logp"] - view["ref"]).detach(), view["label"]
        return torch.stack(
            [
                torch.stack([ratios.masked_fill(~rows, 0).sum(), rows.sum().to(ratios)])
                for rows in (up, ~up)
            ]
        )
    ratios = [(view[f"logp_{side}"] - view[f"ref_{side}"]).detach() for side in "wl"]
    return torch.stack([torch.stack([r.sum(), r.new_full((), r.numel())]) for r in ratios])


@dataclass(frozen=True, slots=True)
class RewardShift:
    """BCO's delta: the running mean over steps of the midpoint of both classes' mean rewards.

    m_k = (mean over desirable + mean over undesirable) / 2 of beta*r; delta_k = delta_{k-1} + (m_k
    - delta_{k-1}) / k from delta_0 = 0. Jung et al. 2024, arXiv 2404.04656, Sec. 3.1. A step
    without one of the classes does not change it.
    """

    delta: float = 0.0
    steps: int = 0

    def after(self, sums: Tensor, beta: float) -> RewardShift:
        """The shift after a step with these ``class_sums``."""
        if not bool(sums[:, 1].all()):
            return self
        middle = beta * float((sums[:, 0] / sums[:, 1]).mean())
        return RewardShift(self.delta + (middle - self.delta) / (self.steps + 1), self.steps + 1)
