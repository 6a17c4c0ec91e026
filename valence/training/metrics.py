"""Pool metrics over micro-batches, the steps of a logging window, and processes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from valence import statistics
from valence.distributed.process_group import Group
from valence.types import Mean, Ranked, sent


class Meter:
    """Collects metrics on their devices and reduces them once, at the end of a window.

    Processes may have different metrics, or none. A mean over nothing is left out, so that an
    absent class is never shown as 0.
    """

    def __init__(self) -> None:
        self.means: dict[str, Mean] = {}
        self.ranked: dict[str, list[Ranked]] = {}  # one statistic per name

    def add(self, metrics: Mapping[str, Mean | Ranked]) -> None:
        for name, metric in metrics.items():
            if isinstance(metric, Ranked):
                self.ranked.setdefault(name, []).append(metric)
            else:
                before = self.means.get(name)
                self.means[name] = (
                    metric
                    if before is None
                    else Mean(before.total + metric.total, before.count + metric.count)
                )

    def pool(self, parts: Mapping[str, Sequence[Mean | Ranked]]) -> None:
        """Add the metrics of several micro-batches."""
        for name, metrics in parts.items():
            for metric in metrics:
                self.add({name: metric})

    def state_dict(self) -> dict[str, Any]:
        ranked = {
            name: [[part.values, part.others, part.statistic] for part in parts]
            for name, parts in self.ranked.items()
        }
        return {
            "means": {name: [mean.total, mean.count] for name, mean in self.means.items()},
            "ranked": ranked,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.means = {name: Mean(*parts) for name, parts in state["means"].items()}
        self.ranked = {
            name: [Ranked(*part) for part in parts] for name, parts in state["ranked"].items()
        }

    def reduce(self, group: Group) -> dict[str, float]:
        """Name -> number over all processes, with one collective and one copy to the host."""
        sums: dict[str, Tensor] = {}
        ranked: dict[str, list[Tensor]] = {}
        statistic_of: dict[str, str] = {}
        for head, content in _messages(group.gather(self._packed()).cpu()):
            means, columns = head["means"], head["ranked"]
            totals, *parts = content.split([2 * len(means), *(2 * size for _, _, size in columns)])
            for name, part in zip(means, totals.view(2, -1).T, strict=True):
                sums[name] = sums[name] + part if name in sums else part
            for (name, statistic, _), part in zip(columns, parts, strict=True):
                ranked.setdefault(name, []).append(part.view(2, -1))
                statistic_of[name] = statistic
        numbers = {
            name: total / count
            for name, (total, count) in ((n, s.tolist()) for n, s in sums.items())
            if count
        }
        for name, parts in ranked.items():
            values, others = torch.cat(parts, 1)
            is_known = ~others.isnan()
            number = STATISTICS[statistic_of[name]](values[is_known], others[is_known])
            if number is not None:
                numbers[name] = number
        if "rewards/chosen" in numbers and "rewards/rejected" in numbers:
            numbers["rewards/margins"] = numbers["rewards/chosen"] - numbers["rewards/rejected"]
        return dict(sorted(numbers.items()))

    def _packed(self) -> Tensor:
        """This process's message: the lengths of its head and of its numbers; the head with their
        names as JSON; totals, counts, and the values and others of each ranked column.
        """
        parts = [part for columns in self.ranked.values() for part in columns]
        tensors = [m.total for m in self.means.values()] + [part.values for part in parts]
        device = next(
            (tensor.device for tensor in tensors if tensor.device.type != "cpu"),
            torch.device("cpu"),
        )
        wide = torch.float32 if device.type == "mps" else torch.float64  # which has no float64

        def concatenate(values: Sequence[Tensor]) -> Tensor:
            flat = [sent(value, device).to(wide).flatten() for value in values]
            return torch.cat(flat) if flat else torch.zeros(0, device=device, dtype=wide)

        ranked = [
            [name, c[0].statistic, sum(len(part.values) for part in c)]
            for name, c in self.ranked.items()
        ]
        head = json.dumps({"means": list(self.means), "ranked": ranked}).encode()
        columns = [
            concatenate([getattr(p, side) for p in c])
            for c in self.ranked.values()
            for side in ("values", "others")
        ]
        numbers = concatenate(
            [
                *(m.total for m in self.means.values()),
                *(m.count for m in self.means.values()),
                *columns,
            ]
        )
        return concatenate(
            [
                torch.tensor([len(head), len(numbers)]),
                torch.frombuffer(bytearray(head), dtype=torch.uint8),
                numbers,
            ]
        )


def _messages(gathered: Tensor) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The heads and numbers of the concatenated messages of all processes."""
    while len(gathered):
        head, numbers = (int(size) for size in gathered[:2])
        rest = len(gathered) - 2 - head - numbers
        _, text, content, gathered = gathered.split([2, head, numbers, rest])
        yield json.loads(bytes(text.to(torch.uint8).tolist())), content


def auc(values: Tensor, positive: Tensor) -> float | None:
    """P(a positive's value is above a negative's), ties counting half (Mann-Whitney).

    None when a class is absent.
    """
    up, down = values[positive.bool()].tolist(), values[~positive.bool()].tolist()
    if not up or not down:
        return None
    return statistics.auc(up, down) if not values.isnan().any() else math.nan  # which has no rank


def calibration_error(probability: Tensor, positive: Tensor, bins: int = 10) -> float | None:
    """Expected calibration error: |share of positives - mean probability| in bins of equal width,
    weighted by the size of each bin. probability[N] in 0..1. None without values.
    """
    if not len(probability):
        return None
    bin_indices = (probability * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(
        0, bin_indices, (positive.double() - probability.double())
    )
    return (gaps.abs().sum() / len(probability)).item()


def pearson(values: Tensor, others: Tensor) -> float | None:
    return statistics.pearson(values.tolist(), others.tolist())


def spearman(values: Tensor, others: Tensor) -> float | None:
    if values.isnan().any():
        return math.nan  # which has no rank
    return statistics.spearman(values.tolist(), others.tolist())


def explained(values: Tensor, others: Tensor) -> float | None:
    """Share of the variance of others [N] that estimates of them explain: 1 - var(others -
    values)/var(others); at most 1, below 0 if their mean would do better. None when others are
    constant.
    """
    if not len(others) or bool(others.min() == others.max()):
        return None
    return (
        1
        - ((others - values).double().var(correction=0) / others.double().var(correction=0)).item()
    )


STATISTICS = {
    "auc": auc,
    "calibration_error": calibration_error,
    "pearson": pearson,
    "spearman": spearman,
    "explained": explained,
}
