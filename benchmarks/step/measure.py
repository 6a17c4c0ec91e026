"""One case on all sides, step by step in turn: figures that agree, then times, then memory."""

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
from benchmarks.step.ours import Figures, Ours, apart
from benchmarks.step.peer import Peer
from benchmarks.step.stage import MAX_LENGTH, Models, draw_sets, padded_tokens

TOLERANCE = 2e-2
"""Relative, of losses and gradient norms in bfloat16: several times as far as TRL is from itself in another precision."""
PROBES = 2  # steps by which the fastest way is found
DEFAULTS_SETS = 1  # TRL at its defaults is measured once, on the first set alone: a step of it takes as long as ten others


class Way(NamedTuple):
    """How TRL computes: "mixed" (float32 weights under autocast, its default), "bfloat16" (weights too) or "float32".
    compiled: its layers are, by torch.compile."""

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
class Plan:
    """How much is measured. ways: those of which TRL at its best takes the fastest. all_sides: TRL with compiled layers and at
    its defaults too, and every side with activation checkpointing."""

    sets: int
    rounds: int
    memory: bool
    all_sides: bool
    ways: tuple[Way, ...]


# In quick runs only the precision that full ones find the faster.
QUICK = Plan(sets=1, rounds=2, memory=True, all_sides=False, ways=(Way("bfloat16"),))
FULL = Plan(sets=2, rounds=3, memory=True, all_sides=True, ways=(Way("mixed"), Way("bfloat16")))


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
    """A case's figures. ``differ``: why no time is to be believed; empty when both sides did the same. left_out: TRL's ways
    that round themselves away from the others, which are shown in their place; each with what it said."""

    case: Case
    way: Way
    ours: Side
    others: dict[str, Side]
    floor: float = 0.0
    agreement: float = 0.0
    differ: str = ""
    left_out: list[str] = field(default_factory=list[str])

    def ratio(self, name: str) -> Spread:
        """How many times as long as Valence another side takes for the same rows."""
        other = self.others[name]
        pairs = zip(self.ours.seconds, other.seconds, strict=False)
        return Spread.of([sum(theirs) / sum(mine[: len(theirs)]) for mine, theirs in pairs])

    @property
    def share(self) -> float:
        return self.floor / self.ours.per_step().median

    def memory(self, which: str) -> float | None:
        """Valence's peak over that of TRL at its best. which: peak or checkpointed."""
        mine, theirs = getattr(self.ours, which), getattr(self.others["best"], which)
        return mine / theirs if mine and theirs else None


def measured(case: Case, models: Models, peer: Peer, cache: Path, plan: Plan) -> Result:
    """All figures of one case."""
    torch.compiler.reset()  # it counts the programs of all models of a process, and gives up at the eighth
    sets = draw_sets(case, plan.sets)
    mine = Ours(case, models, sets, cache, dtype=torch.bfloat16, checkpointing=False)
    peer.ask("rows", sets=[mine.rows(number) for number in range(plan.sets)])
    wanted = [mine.step(number) for number in range(plan.sets)]  # this also compiles
    way, best, left_out = fastest(peer, case, models, plan.ways, wanted)
    sides: dict[str, Steps] = {"ours": mine, "best": best}
    result = Result(case, way, Side("Valence"), {"best": Side(f"TRL best ({way})")}, left_out=left_out)
    # Bars are held against TRL without a compiler, as they were set; with one, which PyTorch's needs, it is shown beside.
    if plan.all_sides and shutil.which("g++"):
        compiled = way._replace(compiled=True)
        sides["compiled"] = load(peer, "compiled", case, models, compiled)
        result.others["compiled"] = Side(f"TRL best ({compiled})")
    result.floor = floor(case, sets)
    if plan.all_sides:
        sides["defaults"] = load(peer, "defaults", case, models, Way("mixed"), best=False)
        result.others["defaults"] = Side("TRL defaults")
    if case.apart:
        split = [apart(units) for units in sets]
        sides["apart"] = alone = Ours(case, models, split, cache, dtype=torch.bfloat16, checkpointing=False)
        for number in range(plan.sets):
            alone.rows(number)
        result.others["apart"] = Side("Valence, nothing shared")
    agree(result, wanted, sides, plan)
    if result.differ:
        return result
    times(result, sides, plan)
    result.floor = min(result.floor, floor(case, sets))  # of a moment in which the machine was not slow
    largest = max(range(plan.sets), key=lambda number: padded_tokens(sets[number]))
    for name, steps in sides.items() if plan.memory else ():
        peak = steps.step(largest, memory=True).peak
        if name == "defaults":  # which recompute activations
            result.others[name].checkpointed = peak
        else:
            (result.ours if name == "ours" else result.others[name]).peak = peak
    if plan.all_sides:
        torch.compiler.reset()
        saving = Ours(case, models, sets, cache, dtype=torch.bfloat16, checkpointing=True)
        result.ours.checkpointed = warm_peak(saving, largest)
        saving_too = load(peer, "checkpointed", case, models, Way(way.precision), checkpointing=True)
        result.others["best"].checkpointed = warm_peak(saving_too, largest)
    return result


def load(
    peer: Peer, name: str, case: Case, models: Models, way: Way, *, best: bool = True, checkpointing: bool = False
) -> Theirs:
    """A session of TRL in one configuration."""
    peer.ask(
        "load", name=name, method=case.method, best=best, checkpointing=checkpointing, max_length=MAX_LENGTH, **way._asdict(),
        policy=str(models.trained(case)), reference=str(models.reference),
        adapter=str(models.adapter) if models.adapter else None,
    )  # fmt: skip
    return Theirs(peer, name)


def fastest(
    peer: Peer, case: Case, models: Models, ways: tuple[Way, ...], wanted: list[Figures]
) -> tuple[Way, Theirs, list[str]]:
    """The way in which TRL at its best is the fastest here, with its session; the others are let go. A way whose rounding leads
    it away from Valence's figures ``wanted`` of each set is left out, and named with what it says, if another does not."""
    sessions = {way: load(peer, str(way), case, models, way) for way in ways}
    if len(ways) == 1:  # whether it agrees is asked later
        return ways[0], sessions[ways[0]], []
    differ = {way: disagreement(wanted, [session.step(k) for k in range(len(wanted))]) for way, session in sessions.items()}
    good = [way for way in ways if not differ[way]] or list(ways)
    seconds = dict.fromkeys(good, float("inf"))
    for _ in range(PROBES):
        for way in good:
            seconds[way] = min(seconds[way], sessions[way].step(0).seconds)
    found = min(good, key=lambda way: seconds[way])
    for way in ways:
        if way != found:
            peer.ask("drop", name=str(way))
    return found, sessions[found], [f"TRL best ({way}), {differ[way]}" for way in ways if way not in good]


def disagreement(mine: list[Figures], other: list[Figures], first: int = 0) -> str:
    """Where losses or gradient norms of two sides are further apart than rounding, on sets from ``first`` on; empty if they are
    not."""
    return "; ".join(
        f"set {number}: {what} {getattr(one, what):.6g} and {getattr(two, what):.6g}"
        for number, (one, two) in enumerate(zip(mine, other, strict=True), first) for what in ("loss", "grad_norm")
        if not relative(getattr(one, what), getattr(two, what)) <= TOLERANCE
    )  # fmt: skip


def relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-9)


def agree(result: Result, wanted: list[Figures], sides: dict[str, Steps], plan: Plan) -> None:
    """Notes how far losses and gradient norms are from Valence's ``wanted``, on every set. This also warms every side up.
    TRL with compiled layers, on which no bar is set, is left out where its programs round it elsewhere than TRL without them."""
    for number, mine in enumerate(wanted):
        for name in ("best", "compiled", "defaults"):
            if name not in sides or (name == "defaults" and number >= DEFAULTS_SETS):
                continue
            other = sides[name].step(number)
            why = disagreement([mine], [other], number)
            if why and name == "compiled":
                result.left_out.append(f"{result.others.pop(name).name}, {why}")
                del sides[name]
                continue
            far = max(relative(getattr(mine, what), getattr(other, what)) for what in ("loss", "grad_norm"))
            result.agreement = max(result.agreement, far)
            if why:
                result.differ += f"{result.others[name].name}, {why}; "
        if "apart" in sides:
            sides["apart"].step(number)


def times(result: Result, sides: dict[str, Steps], plan: Plan) -> None:
    """The rounds. In every other one the sides come in the opposite order."""
    for turn in range(plan.rounds):
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(plan.sets):
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                if name != "defaults" or (turn == 0 and number < DEFAULTS_SETS):
                    taken[name].append(sides[name].step(number).seconds)
        for name, seconds in taken.items():
            if seconds:
                (result.ours if name == "ours" else result.others[name]).seconds.append(seconds)


def warm_peak(steps: Steps, number: int) -> float:
    """Peak memory (MB above idle) of a step that another of its size went before."""
    steps.step(number)
    return steps.step(number, memory=True).peak


def exact(cases: tuple[Case, ...], models_of: Callable[[Case], Models], peer: Peer, cache: Path) -> tuple[float, str]:
    """Both sides in float32 on a small model: the largest relative difference of a loss or gradient norm, and where it was."""
    worst, where = 0.0, ""
    for case in cases:
        models = models_of(case)
        mine = Ours(case, models, draw_sets(case, 2), cache, dtype=torch.float32, checkpointing=False)
        peer.ask("rows", sets=[mine.rows(number) for number in range(2)])
        for best in (True, False):
            session = load(peer, "small", case, models, Way("float32"), best=best)
            for number in range(2):
                ours, theirs = mine.step(number), session.step(number)
                far = max(relative(ours.loss, theirs.loss), relative(ours.grad_norm, theirs.grad_norm))
                if not far <= worst:
                    worst, where = far, f"{case.name}, {'best' if best else 'defaults'}"
    return worst, where
