"""Measure one case on all sides, alternating step by step: agreement, then times, then memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

import torch

from benchmarks.step.cases import Case
from benchmarks.step.floor import floor
from benchmarks.step.peer import Peer
from benchmarks.step.stage import MAX_LENGTH, Models, draw_sets, padded_tokens
from benchmarks.step.valence_side import Figures, ValenceSide, unshared
from valence.types import TokenizedExample

TOLERANCE = 2e-2
"""Relative tolerance of losses and gradient norms in bfloat16: several times the difference of TRL
between two precisions.
"""
PROBES = 2  # steps that decide which way is the fastest
# TRL at its defaults is timed once, on the largest set only: its step takes as long as ten others
DEFAULTS_SETS = 1
FEWEST_PROMPTS = 2  # of all sets together, so that lengths vary


class Way(NamedTuple):
    """TRL's precision: "mixed" (float32 weights under autocast, its default), "bfloat16" (also the
    weights) or "float32". compiled: its layers are compiled with torch.compile.
    """

    precision: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision}{', compiled' if self.compiled else ''}"


class Spread(NamedTuple):
    """Over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


class Steps(Protocol):
    """Something that runs the step of a set of rows."""

    def step(self, number: int, *, memory: bool = False) -> Figures: ...


@dataclass(frozen=True)
class Theirs:
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

    def step(self, number: int, *, memory: bool = False) -> Figures:
        return Figures(loss=0.0, grad_norm=0.0, seconds=floor(self.case, self.sets[number]))


@dataclass(frozen=True)
class Plan:
    """The amount of measurements. steps: minimum number of timed steps of each side. ways: the
    candidates for TRL's fastest configuration. all_sides: also TRL with compiled layers and at its
    defaults, and memory with and without activation checkpointing.
    """

    sets: int
    steps: int
    all_sides: bool
    ways: tuple[Way, ...]

    def drawn(self, case: Case) -> list[list[TokenizedExample]]:
        """The rows of the case's steps, those that take the most memory first."""
        return sorted(
            draw_sets(case, max(self.sets, FEWEST_PROMPTS // case.prompts)),
            key=padded_tokens,
            reverse=True,
        )


# In quick runs only the precision that full ones find the faster.
QUICK = Plan(sets=1, steps=2, all_sides=False, ways=(Way("bfloat16"),))
FULL = Plan(sets=2, steps=8, all_sides=True, ways=(Way("mixed"), Way("bfloat16")))


@dataclass
class Side:
    """What one side was measured to take. seconds[round][set]; peaks in MB above idle."""

    name: str
    seconds: list[list[float]] = field(default_factory=list[list[float]])
    peak: float | None = None
    checkpointed: float | None = None

    def per_step(self) -> Spread:
        return Spread.of([sum(times) / len(times) for times in self.seconds])


@dataclass
class Result:
    """A case's figures.

    ``differ``: why no time is to be believed; empty when both sides did the same. left_out: TRL's
    ways that round themselves away from the others, which are shown in their place; each with what
    it said.
    """

    case: Case
    way: Way
    ours: Side
    others: dict[str, Side]
    floor: Side = field(default_factory=lambda: Side("floor"))
    agreement: float = 0.0
    differ: str = ""
    left_out: list[str] = field(default_factory=list[str])

    def ratio(self, name: str) -> Spread:
        """How many times as long as Valence another side takes for the same rows."""
        other = self.others[name]
        pairs = zip(self.ours.seconds, other.seconds, strict=False)
        return Spread.of([sum(theirs) / sum(mine[: len(theirs)]) for mine, theirs in pairs])

    def share(self, side: Side) -> float:
        """How much of what a side took was the floor of the same round."""
        pairs = zip(self.floor.seconds, side.seconds, strict=True)
        return median(sum(floor_seconds) / sum(seconds) for floor_seconds, seconds in pairs)

    def memory(self, side: str) -> float | None:
        """Valence's peak over that of TRL at its best. which: peak or checkpointed."""
        mine, theirs = getattr(self.ours, side), getattr(self.others["best"], side)
        return mine / theirs if mine and theirs else None


def measured(case: Case, models: Models, peer: Peer, cache: Path, plan: Plan) -> Result:
    """All figures of one case."""
    # it counts the programs of all models of a process, and gives up at the eighth
    torch.compiler.reset()
    sets = plan.drawn(case)
    mine = ValenceSide(case, models, sets, cache, dtype=torch.bfloat16, checkpointing=False)
    peer.ask("rows", sets=[mine.rows(number) for number in range(len(sets))])
    wanted = [mine.step(number) for number in range(len(sets))]  # this also compiles
    way, best, left_out = fastest(peer, case, models, plan.ways, wanted)
    sides: dict[str, Steps] = {"ours": mine, "floor": Floor(case, sets), "best": best}
    result = Result(
        case, way, Side("Valence"), {"best": Side(f"TRL best ({way})")}, left_out=left_out
    )
    # Bars are held against TRL without a compiler, as they were set; with one, which PyTorch's
    # needs, it is shown beside.
    if plan.all_sides and shutil.which("g++"):
        compiled = way._replace(compiled=True)
        sides["compiled"] = load(peer, "compiled", case, models, compiled)
        result.others["compiled"] = Side(f"TRL best ({compiled})")
    if plan.all_sides:
        sides["defaults"] = load(peer, "defaults", case, models, Way("mixed"), best=False)
        result.others["defaults"] = Side("TRL defaults")
    if case.without_sharing:
        split = [unshared(units) for units in sets]
        sides["apart"] = alone = ValenceSide(
            case, models, split, cache, dtype=torch.bfloat16, checkpointing=False
        )
        for number in range(len(sets)):
            alone.rows(number)
        result.others["apart"] = Side("Valence, nothing shared")
    agree(result, wanted, sides)
    if result.differ:
        return result
    times(result, sides, plan.steps // len(sets), len(sets))
    for name, steps in sides.items() if plan.all_sides else ():
        if name not in ("floor", "defaults"):
            (result.ours if name == "ours" else result.others[name]).peak = steps.step(
                0, memory=True
            ).peak
    if plan.all_sides:
        torch.compiler.reset()
        saving = ValenceSide(case, models, sets, cache, dtype=torch.bfloat16, checkpointing=True)
        result.ours.checkpointed = warm_peak(saving)
        saving_too = load(
            peer, "checkpointed", case, models, Way(way.precision), checkpointing=True
        )
        result.others["best"].checkpointed = warm_peak(saving_too)
    return result


def load(
    peer: Peer,
    name: str,
    case: Case,
    models: Models,
    way: Way,
    *,
    best: bool = True,
    checkpointing: bool = False,
) -> Theirs:
    """A session of TRL in one configuration."""
    peer.ask(
        "load",
        name=name,
        method=case.method,
        best=best,
        checkpointing=checkpointing,
        max_length=MAX_LENGTH,
        **way._asdict(),
        policy=str(models.trained(case)),
        reference=str(models.reference),
        adapter=str(models.adapter) if models.adapter else None,
    )
    return Theirs(peer, name)


def fastest(
    peer: Peer, case: Case, models: Models, ways: tuple[Way, ...], wanted: list[Figures]
) -> tuple[Way, Theirs, list[str]]:
    """The way in which TRL at its best is the fastest here, with its session; the others are let
    go. A way whose rounding leads it away from Valence's figures ``wanted`` of each set is left
    out, and named with what it says, if another does not.
    """
    sessions = {way: load(peer, str(way), case, models, way) for way in ways}
    if len(ways) == 1:  # whether it agrees is asked later
        return ways[0], sessions[ways[0]], []
    differ = {
        way: disagreement(wanted, [session.step(k) for k in range(len(wanted))])
        for way, session in sessions.items()
    }
    good = [way for way in ways if not differ[way]] or list(ways)
    seconds = dict.fromkeys(good, float("inf"))
    for _ in range(PROBES):
        for way in good:
            seconds[way] = min(seconds[way], sessions[way].step(0).seconds)
    fastest = min(good, key=lambda way: seconds[way])
    for way in ways:
        if way != fastest:
            peer.ask("drop", name=str(way))
    return (
        fastest,
        sessions[fastest],
        [f"TRL best ({way}), {differ[way]}" for way in ways if way not in good],
    )


def disagreement(mine: list[Figures], other: list[Figures], first: int = 0) -> str:
    """Where losses or gradient norms of two sides are further apart than rounding, on sets from
    ``first`` on; empty if they are not.
    """
    return "; ".join(
        f"set {number}: {quantity} {getattr(one, quantity):.6g} and {getattr(two, quantity):.6g}"
        for number, (one, two) in enumerate(zip(mine, other, strict=True), first)
        for quantity in ("loss", "grad_norm")
        if not relative(getattr(one, quantity), getattr(two, quantity)) <= TOLERANCE
    )


def relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-9)


def agree(result: Result, wanted: list[Figures], sides: dict[str, Steps]) -> None:
    """Notes how far losses and gradient norms are from Valence's ``wanted``, on every set.

    This also warms every side up. TRL with compiled layers, on which no bar is set, is left out
    where its programs round it elsewhere than TRL without them.
    """
    for number, mine in enumerate(wanted):
        for name in ("best", "compiled", "defaults"):
            if name not in sides or (name == "defaults" and number >= DEFAULTS_SETS):
                continue
            other = sides[name].step(number, memory=name == "defaults")
            if other.peak:  # TRL's defaults recompute activations
                result.others[name].checkpointed = other.peak
            why = disagreement([mine], [other], number)
            if why and name == "compiled":
                result.left_out.append(f"{result.others.pop(name).name}, {why}")
                del sides[name]
                continue
            far = max(
                relative(getattr(mine, quantity), getattr(other, quantity))
                for quantity in ("loss", "grad_norm")
            )
            result.agreement = max(result.agreement, far)
            if why:
                result.differ += f"{result.others[name].name}, {why}; "
        if "apart" in sides:
            sides["apart"].step(number)


def times(result: Result, sides: dict[str, Steps], rounds: int, sets: int) -> None:
    """The rounds. In every other one the sides come in the opposite order."""
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
    """Peak memory (MB above idle) of the largest step, behind another of its size."""
    steps.step(0)
    return steps.step(0, memory=True).peak


def exact(
    cases: tuple[Case, ...], models_of: Callable[[Case], Models], peer: Peer, cache: Path
) -> tuple[float, str]:
    """Both sides in float32 on a small model: the largest relative difference of a loss or gradient
    norm, and where it was.
    """
    worst, where = 0.0, ""
    for case in cases:
        models = models_of(case)
        mine = ValenceSide(
            case, models, draw_sets(case, 2), cache, dtype=torch.float32, checkpointing=False
        )
        peer.ask("rows", sets=[mine.rows(number) for number in range(2)])
        for best in (True, False):
            session = load(peer, "small", case, models, Way("float32"), best=best)
            for number in range(2):
                ours, theirs = mine.step(number), session.step(number)
                far = max(
                    relative(ours.loss, theirs.loss), relative(ours.grad_norm, theirs.grad_norm)
                )
                if not far <= worst:
                    worst, where = far, f"{case.name}, {'best' if best else 'defaults'}"
    return worst, where
