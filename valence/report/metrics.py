"""Pooling of metrics: values that carry their reduction, over micro-batches, steps of a logging window, and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from valence.dist.protocol import Group
from valence.types import Mean, Ranked


class Meter:
    """Collects metrics and reduces each once. A mean over nothing is left out, so that an absent class is never shown as 0."""

    def __init__(self) -> None:
        self.means: dict[str, Mean] = {}
        self.ranked: dict[str, list[Ranked]] = {}

    def add(self, metrics: dict[str, Mean | Ranked]) -> None:
        for name, metric in metrics.items():
            if isinstance(metric, Ranked):
                self.ranked.setdefault(name, []).append(metric)
            else:
                before = self.means.get(name)
                self.means[name] = metric if before is None else Mean(before.total + metric.total, before.count + metric.count)

    def pool(self, parts: Mapping[str, Sequence[Mean | Ranked]]) -> None:
        """Adds what several micro-batches measured."""
        for name, metrics in parts.items():
            for metric in metrics:
                self.add({name: metric})

    def reduce(self, group: Group) -> dict[str, float]:
        """Name -> number, over everything added on all processes. All of a kind travel in one message."""
        out: dict[str, float] = {}
        if self.means:
            parts = torch.stack([torch.stack([m.total.cpu().double(), m.count.cpu().double()]) for m in self.means.values()])
            for name, (total, count) in zip(self.means, group.sum(parts).tolist(), strict=True):
                if count:
                    out[name] = total / count
        for name, ranked in self.ranked.items():
            values = group.gather(torch.cat([part.values for part in ranked]))
            positive = group.gather(torch.cat([part.positive for part in ranked]))
            area = auc(values, positive)
            if area is not None:
                out[name] = area
        if "rewards/chosen" in out and "rewards/rejected" in out:
            out["rewards/margins"] = out["rewards/chosen"] - out["rewards/rejected"]
        return dict(sorted(out.items()))


def auc(values: Tensor, positive: Tensor) -> float | None:
    """P(a positive's value is above a negative's), ties counting half (Mann-Whitney). None when a class is absent."""
    values, positive = values.cpu(), positive.cpu()
    up, down = values[positive].double(), values[~positive].double()
    if not len(up) or not len(down):
        return None
    if bool(torch.isnan(values).any()):
        return float("nan")  # it has no rank
    ordered = down.sort().values
    below = torch.searchsorted(ordered, up)
    not_above = torch.searchsorted(ordered, up, right=True)
    return ((below + not_above).double().mean() / (2 * len(down))).item()
