"""The table of a case, and the last line with all figures and bars."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.step.cases import (
    CHECKPOINTED_BAR,
    FLOOR_BAR,
    MEMORY_BAR,
    UNSHARED_BAR,
    WAITING_BAR,
)
from benchmarks.step.measure import Result, Side, Spread
from benchmarks.step.preparation import Preparation

HEAD = (
    f"  {'':30}{'s/step':>8} {'(from-to)':14}{'times Valence':>14} {'(from-to)':14}"
    f"{'of floor':>9}{'peak MB':>9}{'recomputed':>11}"
)


@dataclass(frozen=True)
class Figure:
    """A figure and its bar. is_minimum: the bar is a minimum, not a maximum."""

    name: str
    value: float
    bar: float
    is_minimum: bool = True

    @property
    def is_reached(self) -> bool:
        """Whether the value reaches the bar."""
        return self.value >= self.bar if self.is_minimum else self.value <= self.bar

    def __str__(self) -> str:
        sign = (
            (">=" if self.is_reached else "<")
            if self.is_minimum
            else ("<=" if self.is_reached else ">")
        )
        return f"{self.name} {self.value:.2f}{sign}{self.bar:g}"


def table(result: Result) -> str:
    """A case's figures, one line per side. Without figures if losses or gradients differ."""
    case = result.case
    title = (
        f"\n{case.name}: {case.prompts} prompts x {case.answers} completions, "
        f"{case.shape.name} model"
    )
    if result.disagreement:
        return (
            f"{title}\n  no times, because the sides do not compute the same: {result.disagreement}"
        )
    lines = [
        f"{title}; losses and gradient norms agree to {result.agreement:.0e}",
        HEAD,
        _line(result, result.ours, None),
    ]
    lines += [_line(result, side, result.ratio(name)) for name, side in result.others.items()]
    lines += [f"  excluded, differs by rounding: {reason}" for reason in result.excluded]
    return "\n".join(lines)


def _line(result: Result, side: Side, ratio: Spread | None) -> str:
    step = side.per_step()
    ratio_text = f"{ratio.median:14.2f} {_range(ratio)}" if ratio else " " * 29
    # The minimum time is that of all sets, so sides that ran only some of them have no share.
    share = (
        f"{result.share(side):9.2f}"
        if len(side.seconds) == len(result.floor.seconds)
        else f"{'':9}"
    )
    peaks = f"{_megabytes(side.peak):>9}{_megabytes(side.checkpointed):>11}"
    return f"  {side.name:30}{step.median:8.3f} {_range(step)}{ratio_text}{share}{peaks}"


def _megabytes(peak: float | None) -> str:
    return "" if peak is None else f"{peak:.0f}"


def _range(spread: Spread) -> str:
    return f"{f'({spread.low:.2f}-{spread.high:.2f})':14}"


def figures(results: list[Result], preparations: list[Preparation]) -> list[Figure]:
    """Every figure with a bar. A case whose sides differ has a ratio of zero."""
    figures = [
        Figure(r.case.name, 0.0 if r.disagreement else r.ratio("best").median, r.case.bar)
        for r in results
        if r.case.bar
    ]
    comparable = [r for r in results if r.case.bar and not r.disagreement]
    if comparable:
        figures.append(Figure("floor", min(r.share(r.ours) for r in comparable), FLOOR_BAR))
    for name, attribute, bar in (
        ("memory", "peak", MEMORY_BAR),
        ("recomputed", "checkpointed", CHECKPOINTED_BAR),
    ):
        shares = [share for r in comparable if (share := r.memory(attribute)) is not None]
        if shares:
            figures.append(Figure(name, max(shares), bar, is_minimum=False))
    figures += [
        Figure("sharing", r.ratio("unshared").median, UNSHARED_BAR)
        for r in results
        if r.case.without_sharing and not r.disagreement
    ]
    figures += [
        Figure(
            f"waiting % ({preparation.case.name})",
            preparation.waiting,
            WAITING_BAR,
            is_minimum=False,
        )
        for preparation in preparations
    ]
    return figures


def verdict(results: list[Result], preparations: list[Preparation]) -> tuple[str, bool]:
    """The last line, and whether all figures reach their bars."""
    all_figures = figures(results, preparations)
    is_reached = all(figure.is_reached for figure in all_figures) and not any(
        result.disagreement for result in results
    )
    disagreement = "".join(
        f"{result.case.name} differs " for result in results if result.disagreement
    )
    return (
        f"{' '.join(map(str, all_figures))} {disagreement}{'held' if is_reached else 'short'}",
        is_reached,
    )
