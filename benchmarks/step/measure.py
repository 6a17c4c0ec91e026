"""Measure one case on all sides, alternating step by step: agreement, then times, then memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

import torch

from benchmarks.step.cases import Case
from benchmarks.step.floor import floor
from benchmarks.step.inputs import MAX_LENGTH, Models, draw_sets, padded_tokens
from benchmarks.step.peer import Peer
from benchmarks.step.valence_side import Figures, ValenceSide, unshared
from valence.types import TokenizedExample

TOLERANCE = 2e-2
"""Relative tolerance of losses and gradient norms in bfloat16: several times the difference of TRL
between two precisions.
"""
NUM_PROBES = 2  # timed steps of each variant, to select the fastest
# TRL at its defaults is timed once, on the largest set only: its step takes as long as ten others
DEFAULTS_SETS = 1
FEWEST_PROMPTS = 2  # in all sets together, so that lengths vary


class TrlVariant(NamedTuple):
    """TRL's precision: "mixed" (float32 weights under autocast, its default), "bfloat16" (also the
    weights) or "float32". compiled: its layers are compiled with torch.compile.
    """

    precision: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision}{', compiled' if self.compiled else ''}"


class Spread(NamedTuple):
    """Median and range over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


class Steps(Protocol):
    """A side that runs the step of row set ``number``, and measures its time or its peak memory."""

    def step(self, number: int, *, memory: bool = False) -> Figures: ...


@dataclass(frozen=True)
class TrlSession:
    """A session of TRL's process."""

    peer: Peer
    name: str

    def step(self, number: int, *, memory: bool = False) -> Figures:
        return Figures(**self.peer.ask("step", name=self.name, number=number, memory=memory))


@dataclass(frozen=True)
class Floor:
    """The minimum time of a step, measured in turn with the steps because the machine's rates
    change within minutes.
    """

    case: Case
    sets: list[list[TokenizedExample]]
    dtype: torch.dtype

    def step(self, number: int, *, memory: bool = False) -> Figures:
        return Figures(
            loss=0.0, grad_norm=0.0, seconds=floor(self.case, self.sets[number], self.dtype)
        )


@dataclass(frozen=True)
class Plan:
    """The number of measurements.

    sets: number of row sets. steps: minimum number of timed steps per side. all_sides: also measure
    TRL with compiled layers, TRL at its defaults, and memory with and without activation
    checkpointing. variants: candidates for TRL's fastest configuration.
    """

    sets: int
    steps: int
    all_sides: bool
    variants: tuple[TrlVariant, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def defaults(self) -> TrlVariant:
        """TRL's precision at its defaults."""
        return TrlVariant("mixed" if self.dtype == torch.bfloat16 else "float32")

    @property
    def in_float32(self) -> Plan:
        """The same in float32 on both sides: for CPUs without instructions for bfloat16."""
        return replace(self, variants=(TrlVariant("float32"),), dtype=torch.float32)

    def draw_rows(self, case: Case) -> list[list[TokenizedExample]]:
        """The row sets of a case, with the largest padded size first."""
        return sorted(
            draw_sets(case, max(self.sets, FEWEST_PROMPTS // case.prompts)),
            key=padded_tokens,
            reverse=True,
        )


# Quick runs use the precision that is faster in full runs.
QUICK = Plan(sets=1, steps=2, all_sides=False, variants=(TrlVariant("bfloat16"),))
FULL = Plan(sets=2, steps=8, all_sides=True, variants=(TrlVariant("mixed"), TrlVariant("bfloat16")))


@dataclass
class Side:
    """Measurements of one side. seconds[round][set]; peak, checkpointed: peak memory (MB above
    idle) without and with activation checkpointing.
    """

    name: str
    seconds: list[list[float]] = field(default_factory=list[list[float]])
    peak: float | None = None
    checkpointed: float | None = None

    def per_step(self) -> Spread:
        return Spread.of([sum(times) / len(times) for times in self.seconds])


@dataclass
class Result:
    """A case's figures.

    ``differ``: why no time is to be believed; empty when both sides did the same. excluded: TRL's
    ways that round themselves away from the others, which are shown in their place; each with what
    it said.
    """

    case: Case
    variant: TrlVariant
    ours: Side
    others: dict[str, Side]
    floor: Side = field(default_factory=lambda: Side("floor"))
    agreement: float = 0.0
    disagreement: str = ""
    excluded: list[str] = field(default_factory=list[str])

    def ratio(self, name: str) -> Spread:
        """Time of another side divided by Valence's time for the same row sets."""
        other = self.others[name]
        pairs = zip(self.ours.seconds, other.seconds, strict=False)
        return Spread.of([sum(theirs) / sum(mine[: len(theirs)]) for mine, theirs in pairs])

    def share(self, side: Side) -> float:
        """Median of the minimum time divided by a side's time in the same round."""
        pairs = zip(self.floor.seconds, side.seconds, strict=True)
        return median(sum(floor_seconds) / sum(seconds) for floor_seconds, seconds in pairs)

    def memory(self, side: str) -> float | None:
        """Valence's memory divided by TRL's in its fastest configuration. side: "peak" or
        "checkpointed".
        """
        mine, theirs = getattr(self.ours, side), getattr(self.others["best"], side)
        return mine / theirs if mine and theirs else None


def measure(case: Case, models: Models, peer: Peer, cache: Path, plan: Plan) -> Result:
    """Measure one case on all sides."""
    # torch.compile limits the number of programs per process, over all models
    torch.compiler.reset()
    sets = plan.draw_rows(case)
    valence = ValenceSide(case, models, sets, cache, dtype=plan.dtype, checkpointing=False)
    peer.ask("rows", sets=[valence.rows(number) for number in range(len(sets))])
    expected = [valence.step(number) for number in range(len(sets))]  # this also compiles
    variant, best, excluded = fastest(peer, case, models, plan.variants, expected)
    sides: dict[str, Steps] = {
        "ours": valence,
        "floor": Floor(case, sets, plan.dtype),
        "best": best,
    }
    result = Result(
        case, variant, Side("Valence"), {"best": Side(f"TRL best ({variant})")}, excluded=excluded
    )
    # Bars are held against TRL without a compiler, as they were set; with one, which PyTorch's
    # needs, it is shown beside.
    if plan.all_sides and shutil.which("g++"):
        compiled = variant._replace(compiled=True)
        sides["compiled"] = load(peer, "compiled", case, models, compiled)
        result.others["compiled"] = Side(f"TRL best ({compiled})")
    if plan.all_sides:
        sides["defaults"] = load(peer, "defaults", case, models, plan.defaults, best=False)
        result.others["defaults"] = Side("TRL defaults")
    if case.without_sharing:
        unshared_sets = [unshared(units) for units in sets]
        sides["unshared"] = unshared_side = ValenceSide(
            case, models, unshared_sets, cache, dtype=plan.dtype, checkpointing=False
        )
        for number in range(len(sets)):
            unshared_side.rows(number)
        result.others["unshared"] = Side("Valence, nothing shared")
    check_agreement(result, expected, sides)
    if result.disagreement:
        return result
    time_rounds(result, sides, plan.steps // len(sets), len(sets))
    for name, steps in sides.items() if plan.all_sides else ():
        if name not in ("floor", "defaults"):
            (result.ours if name == "ours" else result.others[name]).peak = steps.step(
                0, memory=True
            ).peak
    if plan.all_sides:
        torch.compiler.reset()
        valence_checkpointed = ValenceSide(
            case, models, sets, cache, dtype=plan.dtype, checkpointing=True
        )
        result.ours.checkpointed = warm_peak(valence_checkpointed)
        trl_checkpointed = load(
            peer, "checkpointed", case, models, TrlVariant(variant.precision), checkpointing=True
        )
        result.others["best"].checkpointed = warm_peak(trl_checkpointed)
    return result


def load(
    peer: Peer,
    name: str,
    case: Case,
    models: Models,
    variant: TrlVariant,
    *,
    best: bool = True,
    checkpointing: bool = False,
) -> TrlSession:
    """Start a session of TRL in one configuration."""
    peer.ask(
        "load",
        name=name,
        method=case.method,
        best=best,
        checkpointing=checkpointing,
        max_length=MAX_LENGTH,
        **variant._asdict(),
        policy=str(models.trained(case)),
        reference=str(models.reference),
        adapter=str(models.adapter) if models.adapter else None,
    )
    return TrlSession(peer, name)


def fastest(
    peer: Peer,
    case: Case,
    models: Models,
    variants: tuple[TrlVariant, ...],
    expected: list[Figures],
) -> tuple[TrlVariant, TrlSession, list[str]]:
    """The way in which TRL at its best is the fastest here, with its session; the others are let
    go. A way whose rounding leads it away from Valence's figures ``wanted`` of each set is left
    out, and named with what it says, if another does not.
    """
    sessions = {variant: load(peer, str(variant), case, models, variant) for variant in variants}
    if len(variants) == 1:  # whether it agrees is asked later
        return variants[0], sessions[variants[0]], []
    disagreements = {
        variant: disagreement(expected, [session.step(k) for k in range(len(expected))])
        for variant, session in sessions.items()
    }
    candidates = [variant for variant in variants if not disagreements[variant]] or list(variants)
    seconds = dict.fromkeys(candidates, float("inf"))
    for _ in range(NUM_PROBES):
        for variant in candidates:
            seconds[variant] = min(seconds[variant], sessions[variant].step(0).seconds)
    fastest = min(candidates, key=lambda variant: seconds[variant])
    for variant in variants:
        if variant != fastest:
            peer.ask("drop", name=str(variant))
    return (
        fastest,
        sessions[fastest],
        [
            f"TRL best ({variant}), {disagreements[variant]}"
            for variant in variants
            if variant not in candidates
        ],
    )


def disagreement(mine: list[Figures], other: list[Figures], first: int = 0) -> str:
    """Losses and gradient norms of two sides that differ by more than TOLERANCE, as text; empty if
    none does. first: number of the first set.
    """
    return "; ".join(
        f"set {number}: {quantity} {getattr(one, quantity):.6g} and {getattr(two, quantity):.6g}"
        for number, (one, two) in enumerate(zip(mine, other, strict=True), first)
        for quantity in ("loss", "grad_norm")
        if not relative(getattr(one, quantity), getattr(two, quantity)) <= TOLERANCE
    )


def relative(one: float, other: float) -> float:
    """Relative difference."""
    return abs(one - other) / max(abs(one), abs(other), 1e-9)


def check_agreement(result: Result, expected: list[Figures], sides: dict[str, Steps]) -> None:
    """Notes how far losses and gradient norms are from Valence's ``wanted``, on every set.

    This also warms every side up. TRL with compiled layers, on which no bar is set, is left out
    where its programs round it elsewhere than TRL without them.
    """
    for number, mine in enumerate(expected):
        for name in ("best", "compiled", "defaults"):
            if name not in sides or (name == "defaults" and number >= DEFAULTS_SETS):
                continue
            other = sides[name].step(number, memory=name == "defaults")
            if other.peak:  # TRL's defaults recompute activations
                result.others[name].checkpointed = other.peak
            why = disagreement([mine], [other], number)
            if why and name == "compiled":
                result.excluded.append(f"{result.others.pop(name).name}, {why}")
                del sides[name]
                continue
            far = max(
                relative(getattr(mine, quantity), getattr(other, quantity))
                for quantity in ("loss", "grad_norm")
            )
            result.agreement = max(result.agreement, far)
            if why:
                result.disagreement += f"{result.others[name].name}, {why}; "
        if "unshared" in sides:
            sides["unshared"].step(number)


def time_rounds(result: Result, sides: dict[str, Steps], rounds: int, sets: int) -> None:
    """Time all sides in each round. The order of the sides alternates."""
    of = {"ours": result.ours, "floor": result.floor, **result.others}
    for turn in range(rounds):
        durations: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(sets):
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                if name != "defaults" or (turn == 0 and number < DEFAULTS_SETS):
                    durations[name].append(sides[name].step(number).seconds)
        for name, seconds in durations.items():
            if seconds:
                of[name].seconds.append(seconds)


def warm_peak(steps: Steps) -> float:
    """Peak memory (MB above idle) of the largest step, after a warm-up step of the same size."""
    steps.step(0)
    return steps.step(0, memory=True).peak


def exact(
    cases: tuple[Case, ...], models_of: Callable[[Case], Models], peer: Peer, cache: Path
) -> tuple[float, str]:
    """Largest relative difference of a loss or gradient norm in float32 on small models, and its
    case.
    """
    worst, worst_case = 0.0, ""
    for case in cases:
        models = models_of(case)
        valence = ValenceSide(
            case, models, draw_sets(case, 2), cache, dtype=torch.float32, checkpointing=False
        )
        peer.ask("rows", sets=[valence.rows(number) for number in range(2)])
        for best in (True, False):
            session = load(peer, "small", case, models, TrlVariant("float32"), best=best)
            for number in range(2):
                ours, theirs = valence.step(number), session.step(number)
                difference = max(
                    relative(ours.loss, theirs.loss), relative(ours.grad_norm, theirs.grad_norm)
                )
                if not difference <= worst:
                    worst, worst_case = difference, f"{case.name}, {'best' if best else 'defaults'}"
    return worst, worst_case
