"""The held-out metric by which the trials of a sweep are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from valence.config.load import LoadedRecipe
from valence.config.needs import method_in
from valence.errors import UserError
from valence.reports.comparison import direction

VERDICT_METRICS = ("reward/mean", "rewards/auc", "rewards/accuracies", "rewards/spearman")
"""Metrics that the verdict of a report uses, in its order of preference. Larger is better."""
LIKELIHOOD = "logps/token"
"""The metric of methods that imitate demonstrations. Larger is better."""

SCALES = (
    (
        r"(\w+/)?(loss|rewards/(chosen|rejected|margins|error))(/.+)?",
        ("method", "loss", "mix"),
    ),
    (r"(\w+/)?reward/.+", ("reward",)),
)
"""Patterns of metrics, and the sections that set their scale."""


class Objectives:
    """Chooses the metric to compare, and whether larger is better.

    requested: ``NAME`` or ``NAME:max`` or ``NAME:min``, with or without ``eval/``.
    """

    def __init__(
        self, source: LoadedRecipe, varied: Sequence[str], requested: str | None = None
    ) -> None:
        """Raises UserError without held-out rows, and for a metric whose scale the sweep varies."""
        recipe = source.recipe
        if not recipe.data.eval:
            raise UserError(
                "a sweep compares trials on held-out rows, and there are none",
                code="sweep-without-eval",
                where="data.eval",
                fix="set data.eval to a share of the rows, such as 0.1, or to a file of other rows",
            )
        self._varied = tuple(varied)
        self._imitates = method_in(recipe).kind == "demonstration"
        self._requested, self._sign = None, 0
        if requested is not None:
            name, _, goal = requested.removeprefix("eval/").partition(":")
            self._requested = name
            self._sign = {"max": 1, "min": -1}.get(goal, 0) or _direction(name)
            if not self._sign or goal not in ("", "max", "min"):
                raise UserError(
                    f"it is not known whether a larger {name} is better",
                    code="objective-direction",
                    where="--objective",
                    fix=f"write {name}:max or {name}:min, or name a metric that `valence "
                    "train` prints, such as rewards/auc",
                )
            self._check_scale(name)

    def choose(self, metrics: Mapping[str, Any]) -> tuple[str, int]:
        """The name of the objective and its sign (1: larger is better), from the metrics of an
        evaluation, without ``eval/``.

        Raises UserError if the metric is missing, or if there is none to compare.
        """
        if self._requested is not None:
            if self._requested not in metrics:
                raise UserError(
                    f"the evaluation has no metric {self._requested}",
                    code="metric-unknown",
                    where="--objective",
                    fix=f"name one of {', '.join(sorted(metrics))}",
                )
            return self._requested, self._sign
        for name in VERDICT_METRICS:
            if name in metrics:
                self._check_scale(name)
                return name, 1
        if self._imitates and LIKELIHOOD in metrics:
            return LIKELIHOOD, 1
        self._check_scale("loss")
        return "loss", -1

    def _check_scale(self, name: str) -> None:
        """Raise UserError for a metric that means something else in each trial."""
        for pattern, sections in SCALES:
            varied = [n for n in self._varied if n.split(".")[0] in sections]
            if varied and re.fullmatch(pattern, name):
                raise UserError(
                    f"the scale of {name} depends on {varied[0]}, which the sweep varies",
                    code="objective-scale",
                    where="--objective",
                    fix="name another metric of the evaluations, such as --objective rewards/auc "
                    "(`valence train` prints them)",
                )


def _direction(name: str) -> int:
    return 1 if name == LIKELIHOOD else direction(name)
