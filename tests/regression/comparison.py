"""Compare two recordings: the same metrics in the same steps, the same weights, and the same
outputs and errors of commands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.regression.command_comparison import compare_errors, compare_outputs
from tests.regression.command_recording import ERRORS_FILE, OUTPUTS_FILE
from tests.regression.recording import ERROR, INPUTS, METRICS, WEIGHTS

TOLERANCE = 1e-6
"""Largest relative difference, of float32."""


@dataclass(frozen=True)
class Difference:
    """Of a metric at a step, or of a tensor. relative: inf where one cannot be subtracted from
    the other."""

    where: str
    relative: float
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: relative {self.relative:.2g}, {self.detail}"


@dataclass(frozen=True)
class Comparison:
    """Of a recipe. problems: what is missing, or has another shape. metrics, tensors: all that are
    not equal bit by bit, in the order of the log."""

    problems: list[str] = field(default_factory=list[str])
    metrics: list[Difference] = field(default_factory=list[Difference])
    tensors: list[Difference] = field(default_factory=list[Difference])

    @property
    def is_identical(self) -> bool:
        return not (self.problems or self.metrics or self.tensors)

    @property
    def is_same(self) -> bool:
        """Whether nothing is missing and no difference exceeds the tolerance."""
        every = (*self.metrics, *self.tensors)
        return not self.problems and all(item.relative <= TOLERANCE for item in every)

    def lines(self) -> Iterator[str]:
        """What to print: the verdict, and what it rests on."""
        if self.is_identical:
            yield "identical"
            return
        yield f"within {TOLERANCE:g}" if self.is_same else "DIFFERENT"
        yield from _shortened(self.problems)
        for kind, result in (("metrics", self.metrics), ("tensors", self.tensors)):
            if result:
                largest = max(result, key=lambda difference: difference.relative)
                yield f"{len(result)} {kind} differ, most of all {largest}"
        first = next((metric for metric in self.metrics if metric.relative > TOLERANCE), None)
        if first:
            yield f"the first metric above {TOLERANCE:g} is {first}"


def compare(ours: Path, theirs: Path, say: Callable[[str], None] = print) -> bool:
    """Print how the recordings in two folders compare. Returns whether they agree."""
    inputs = [_read_json(folder / INPUTS) for folder in (ours, theirs)]
    odd = sorted(name for name in {**inputs[0], **inputs[1]} if not _agree(inputs, name))
    if odd:
        say(f"the recordings have different inputs: {', '.join(odd)}")
    names = _names(ours, theirs)
    parts = [not names or compare_recipes(ours, theirs, names, say)]
    parts += [compare_part(ours, theirs, say) for compare_part in (compare_outputs, compare_errors)]
    has_parts = names or any((ours / name).exists() for name in (OUTPUTS_FILE, ERRORS_FILE))
    return all(parts) and bool(has_parts) and not odd


def compare_recipes(
    ours: Path, theirs: Path, names: Sequence[str], say: Callable[[str], None]
) -> bool:
    """Print how the recordings of recipes compare. Returns whether they agree."""
    comparisons = {name: compare_recipe(ours / name, theirs / name) for name in names}
    for name, comparison in comparisons.items():
        first, *more = comparison.lines()
        say(f"{name:<20}{first}")
        for line in more:
            say(f"    {line}")
    identical = sum(value.is_identical for value in comparisons.values())
    same = sum(value.is_same for value in comparisons.values())
    say(
        f"{len(comparisons)} recipes: {identical} identical, {same - identical} within"
        f" {TOLERANCE:g}, {len(comparisons) - same} different"
    )
    return same == len(comparisons)


def compare_recipe(ours: Path, theirs: Path) -> Comparison:
    """Compare the recordings of one recipe."""
    problems = [
        f"{'first' if folder is ours else 'second'} recording: {kind}"
        for folder in (ours, theirs)
        if (kind := _missing(folder))
    ]
    if problems:
        return Comparison(problems)
    odd_metrics, metrics = _compare_logs(_read_log(ours), _read_log(theirs))
    odd_tensors, tensors = _compare_tensors(load_file(ours / WEIGHTS), load_file(theirs / WEIGHTS))
    return Comparison([*odd_metrics, *odd_tensors], metrics, tensors)


def _missing(folder: Path) -> str:
    """Why a recipe has no results; empty if it has."""
    if not folder.is_dir():
        return "does not have the recipe"
    if not (folder / ERROR).exists():
        return ""
    lines = (folder / ERROR).read_text(encoding="utf-8").splitlines()
    unindented = [line for line in lines if line and not line.startswith(" ")]
    return f"the run failed: {unindented[-1]}"


def _names(*folders: Path) -> list[str]:
    return sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()})


def _agree(inputs: Sequence[Mapping[str, str]], name: str) -> bool:
    return inputs[0].get(name) == inputs[1].get(name)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _compare_logs(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> tuple[list[str], list[Difference]]:
    """Problems and differences."""
    steps = [[record.get("step") for record in log] for log in (ours, theirs)]
    if steps[0] != steps[1]:
        return [f"the logs have the steps {steps[0]} and {steps[1]}"], []
    records = list(zip(steps[0], ours, theirs, strict=True))
    problems = [
        line for step, a, b in records for line in _absent("metric", a, b, f" at step {step}")
    ]
    differences = [
        Difference(
            f"{name} at step {step}", _of_numbers(a[name], b[name]), f"{a[name]} and {b[name]}"
        )
        for step, a, b in records
        for name in a
        if name in b and a[name] != b[name]
    ]
    return problems, differences


def _compare_tensors(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> tuple[list[str], list[Difference]]:
    """Problems and differences."""
    problems, differences = list(_absent("tensor", ours, theirs, "")), list[Difference]()
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            kinds = " and ".join(f"{item.dtype} {list(item.shape)}" for item in (a, b))
            problems.append(f"tensor {name} is {kinds}")
        elif not torch.equal(a, b):
            differences.append(_of_tensors(name, a.double(), b.double()))
    return problems, differences


def _absent(
    kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str
) -> Iterator[str]:
    for word, missing in (
        ("first", sorted(theirs.keys() - ours.keys())),
        ("second", sorted(ours.keys() - theirs.keys())),
    ):
        if missing:
            names = ", ".join(_shortened(missing))
            yield f"{kind}s missing in the {word} recording{where}: {names}"


def _shortened(texts: Sequence[str], shown: int = 3) -> list[str]:
    """The first texts, and how many more there are."""
    rest = len(texts) - shown
    return [*texts[:shown], f"{rest} more"] if rest > 1 else list(texts)


def _of_numbers(a: Any, b: Any) -> float:
    """The relative difference of two values of a metric."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) / max(abs(a), abs(b))
    return math.inf


def _of_tensors(name: str, a: Tensor, b: Tensor) -> Difference:
    """The norm of the difference as a share of the larger norm."""
    gap, norm = a - b, max(a.norm().item(), b.norm().item())
    relative = gap.norm().item() / norm
    detail = f"largest absolute difference {gap.abs().max().item():.2g}"
    return Difference(name, math.inf if math.isnan(relative) else relative, detail)
