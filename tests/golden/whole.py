"""The loss of a whole step in plain Python numbers, by the formula book: masks, sums, modifiers, weights, averages, statistics.

What has no gradient by definition is read at the weights where a slope is taken.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev, stdev
from typing import Any

from tests.golden import test_paired as paired
from tests.golden.measured import LEVELS, Said, crossed, rows
from tests.golden.test_coupled import aot_formula, unpaired_formula
from tests.golden.test_policy import ppo_formula
from tests.golden.test_unpaired import apo_formula, bco_formula, kto_formula
from valence.training.methods import METHODS
from valence.types import Encoded


@dataclass(frozen=True)
class Step:
    """Which rows a step has (indices), what was measured of them, and the same at the weights where a slope is taken."""

    name: str
    settings: dict[str, Any]
    chosen: Sequence[int]
    now: list[list[Said]]
    held: list[list[Said]]
    delta: float = 0.0

    @property
    def rows(self) -> list[Encoded]:
        found = [rows(METHODS[self.name].kind)[i] for i in self.chosen]
        if self.name != "ordinal":
            return found
        return [replace(row, scores=tuple(1 + (LEVELS - 1) * share for share in row.scores)) for row in found]

    def sums(self, said: Said, most: int | None = None) -> tuple[float, float]:
        """Of an answer under policy and reference, as a loss reads them. ``most``: tokens that count in full."""
        clamped = [self.clamped(x, ref) for x, ref in zip(said.logp, said.ref, strict=True)]
        share = [1.0 if most is None or t < most else self.settings["ld_alpha"] for t in range(said.n)]
        return dot(share, clamped), dot(share, said.ref)

    def clamped(self, logp: float, ref: float) -> float:
        if self.settings["humanline"] is None:
            return logp
        low, high = self.settings["humanline"]
        return ref + min(max(logp - ref, low), high)

    def pair(self, i: int) -> dict[str, float]:
        """The numbers of a pair that its loss may read."""
        row, (w, l) = self.rows[i], self.now[i]
        most = min(w.n, l.n)
        (logp_w, ref_w), (logp_l, ref_l) = self.sums(w, most), self.sums(l, most)
        if self.settings["f_divergence"] != "reverse_kl":
            logp_w, logp_l = self.score(logp_w - ref_w), self.score(logp_l - ref_l)
            ref_w = ref_l = 0.0
        wrong = self.settings["label_smoothing"] if row.soft is None else 1 - row.soft
        return {
            "logp_w": logp_w, "logp_l": logp_l, "ref_w": ref_w, "ref_l": ref_l, "n_w": w.n, "n_l": l.n, "margin": row.margin,
            "wrong": wrong, "delta": self.delta,
        }  # fmt: skip

    def score(self, r: float) -> float:
        a = self.settings["f_alpha"]
        match self.settings["f_divergence"]:
            case "forward_kl":
                return 1 - math.exp(-r)
            case "js":
                return math.log(2) + paired.log_sigmoid(r)
            case _:
                return (math.exp((a - 1) * r) - 1) / (a - 1)

    def weight(self, i: int) -> float:
        """Of a row, times (with wpo) how likely the policy is to give both answers of a pair."""
        if not self.settings["wpo"]:
            return self.rows[i].weight
        likely = [fmean(p - s for p, s in zip(x.logp, x.log_sum_sq, strict=True)) for x in self.held[i]]
        return self.rows[i].weight * math.exp(sum(likely))


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def call(formula: Callable[..., Any], numbers: dict[str, Any], settings: dict[str, Any]) -> float:
    """With those of the numbers and settings that it reads."""
    return formula(**{k: v for k, v in (numbers | settings).items() if k in inspect.signature(formula).parameters})


def nll(step: Step) -> float:
    """The chosen answers' own term, of what was measured before any modifier."""
    likely = [(row.weight, sum(w.logp), w.n) for row, (w, _) in zip(step.rows, step.now, strict=True)]
    if step.settings["nll_average"] == "token":
        return -sum(weight * logp for weight, logp, _ in likely) / sum(n for *_, n in likely)
    return -sum(weight * logp / n for weight, logp, n in likely) / len(likely)


def mean_of_pairs(formula: Callable[..., float]) -> Callable[[Step], float]:
    own_nll = "nll_weight" in inspect.signature(formula).parameters

    def total(step: Step) -> float:
        every = range(len(step.rows))
        found = sum(step.weight(i) * call(formula, step.pair(i), step.settings) for i in every) / len(step.rows)
        return found if own_nll else found + step.settings["nll_weight"] * nll(step)

    return total


def aot(step: Step) -> float:
    pairs = [step.pair(i) for i in range(len(step.rows))]
    gaps, refs = ([p[f"{name}_w"] - p[f"{name}_l"] for p in pairs] for name in ("logp", "ref"))
    losses = aot_formula(gaps, refs, [p["wrong"] for p in pairs], step.settings["beta"])
    found = sum(step.weight(i) * loss for i, loss in enumerate(losses)) / len(pairs)
    return found + step.settings["nll_weight"] * nll(step)


def reference_points(step: Step) -> list[float]:
    """z0 of each row. Step order is the order of the rows, whose texts all differ."""
    scope, kind, count = step.settings.get("z0_scope", "step"), METHODS[step.name].kind, len(step.chosen)
    size, pairing = (count, "next") if scope == "step" else (scope["group"], scope["pairing"])
    found: list[float] = []
    for start in range(0, count, size):
        run = step.chosen[start : start + size]
        partners = {"next": [*run[1:], run[0]], "previous": [run[-1], *run[:-1]], "reversed": run[::-1]}[pairing]
        sums = [step.sums(crossed(kind, i, j)) for i, j in zip(run, partners, strict=True)]
        found += [max(0.0, fmean(logp - ref for logp, ref in sums))] * len(run)
    return found


def mean_of_answers(formula: Callable[..., float]) -> Callable[[Step], float]:
    def total(step: Step) -> float:
        points = reference_points(step) if "z0" in inspect.signature(formula).parameters else [0.0] * len(step.rows)
        found = 0.0
        for row, (said,), z0 in zip(step.rows, step.now, points, strict=True):
            logp, ref = step.sums(said)
            numbers = {"logp": logp, "ref": ref, "label": row.label, "z0": z0, "delta": step.delta}
            found += row.weight * call(formula, numbers, step.settings)
        return found / len(step.rows)

    return total


def aot_unpaired(step: Step) -> float:
    labels = [bool(row.label) for row in step.rows]
    ratios = [logp - ref for logp, ref in (step.sums(said) for (said,) in step.now)]
    losses = unpaired_formula(ratios, labels, step.settings["beta"], step.settings["label_smoothing"])
    return sum(row.weight * loss for row, loss in zip(step.rows, losses, strict=True)) / min(sum(labels), labels.count(False))


def sft(step: Step) -> float:
    tokens = sum(said.n for (said,) in step.now)
    return -sum(row.weight * sum(said.logp) for row, (said,) in zip(step.rows, step.now, strict=True)) / tokens


def dft(step: Step) -> float:
    tokens = sum(said.n for (said,) in step.now)
    found = [dot([math.exp(x) for x in held.logp], said.logp) for (held,), (said,) in zip(step.held, step.now, strict=True)]
    return -sum(row.weight * x for row, x in zip(step.rows, found, strict=True)) / tokens


def of_answers(step: Step, advantages: list[list[float]]) -> list[tuple[float, int, float]]:
    """Of every answer of a ranking: its row's weight, its tokens, and the sum of their losses, with the divergence (of what was
    measured before any modifier). The reference has answered."""
    found: list[tuple[float, int, float]] = []
    for row, said, advs in zip(step.rows, step.now, advantages, strict=True):
        for x, adv in zip(said, advs, strict=True):
            tokens = [{"logp_t": step.clamped(p, ref), "old_t": ref, "adv_t": adv} for p, ref in zip(x.logp, x.ref, strict=True)]
            losses = [call(ppo_formula, token, step.settings) for token in tokens]
            apart = [divergence(step, ref - p) for p, ref in zip(x.logp, x.ref, strict=True)]
            found.append((row.weight, x.n, sum(losses) + step.settings["kl_weight"] * sum(apart)))
    return found


def divergence(step: Step, x: float) -> float:
    return x**2 / 2 if step.settings["kl_estimator"] == "k2" else math.exp(x) - x - 1


def grpo(step: Step) -> float:
    advantages = [[(score - fmean(row.scores)) / (stdev(row.scores) + 1e-4) for score in row.scores] for row in step.rows]
    return fmean(weight * loss / n for weight, n, loss in of_answers(step, advantages))


def ppo(step: Step) -> float:
    every = [score for row in step.rows for score in row.scores]
    advantages = [[(score - fmean(every)) / (pstdev(every) + 1e-4) for score in row.scores] for row in step.rows]
    found = of_answers(step, advantages)
    return sum(weight * loss for weight, _, loss in found) / sum(n for _, n, _ in found)


def bradley_terry(step: Step) -> float:
    found = 0.0
    for row, (w, l) in zip(step.rows, step.now, strict=True):
        loss = -paired.log_sigmoid(w.score[0] - l.score[0] - row.margin)
        found += row.weight * (loss + step.settings["center_coef"] * (w.score[0] + l.score[0]) ** 2)
    return found / len(step.rows)


def mean_of_scored(each: Callable[[float, float, Said, dict[str, Any]], float]) -> Callable[[Step], float]:
    """each: score, target, all else that was measured, settings."""

    def total(step: Step) -> float:
        found = 0.0
        for row, (said,) in zip(step.rows, step.now, strict=True):
            given = [(x, t) for x, t in zip(said.score, row.scores, strict=True) if not math.isnan(t)]
            found += row.weight * fmean(each(x, t, said, step.settings) for x, t in given) if given else 0.0
        return found / len(step.rows)

    return total


def pointwise(score: float, target: float, said: Said, settings: dict[str, Any]) -> float:
    e, delta = abs(score - target), settings["huber_delta"]
    match settings["error"]:
        case "cross_entropy":
            return -target * paired.log_sigmoid(score) - (1 - target) * paired.log_sigmoid(-score)
        case "squared":
            return e**2
        case _:
            return e**2 / 2 if e <= delta else delta * (e - delta / 2)


def ordinal(score: float, target: float, said: Said, settings: dict[str, Any]) -> float:
    at_most = [0.0, *(paired.sigmoid(theta - score) for theta in said.thresholds), 1.0]
    return -math.log(at_most[int(target)] - at_most[int(target) - 1])


IDLE = {
    "humanline": None, "ld_alpha": 1.0, "label_smoothing": 0.0, "f_divergence": "reverse_kl", "f_alpha": 0.5, "wpo": False,
    "nll_weight": 0.0, "nll_average": "token", "kl_weight": 0.0, "kl_estimator": "k3",
}  # fmt: skip
"""Settings of modifiers that change nothing."""
CLIP = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}
BETA = {"beta": 0.1}
WHOLE_STEP: dict[str, tuple[Callable[[Step], float], dict[str, Any]]] = {
    "kto": (mean_of_answers(kto_formula), BETA | {"desirable_weight": 1.0, "undesirable_weight": 1.0}),
    "apo_zero_unpaired": (mean_of_answers(apo_formula), BETA),
    "bco": (mean_of_answers(bco_formula), BETA),
    "aot_unpaired": (aot_unpaired, BETA),
    "dpo": (mean_of_pairs(paired.dpo), BETA),
    "dpo_norm": (mean_of_pairs(paired.dpo_norm), {"beta": 5.0}),
    "robust_dpo": (mean_of_pairs(paired.robust_dpo), BETA),
    "ipo": (mean_of_pairs(paired.ipo), {"tau": 0.1, "normalize": True}),
    "hinge": (mean_of_pairs(paired.hinge), BETA),
    "slic": (mean_of_pairs(paired.slic), {"margin": 1.0, "nll_weight": 0.1}),
    "simpo": (mean_of_pairs(paired.simpo), {"beta": 2.0, "gamma_beta_ratio": 0.5}),
    "cpo": (mean_of_pairs(paired.cpo), BETA | {"nll_weight": 1.0}),
    "orpo": (mean_of_pairs(paired.orpo), BETA),
    "apo_zero": (mean_of_pairs(paired.apo_zero), BETA),
    "apo_down": (mean_of_pairs(paired.apo_down), BETA),
    "exo": (mean_of_pairs(paired.exo), BETA | {"label_smoothing": 1e-3}),
    "nca": (mean_of_pairs(paired.nca), BETA),
    "bco_pair": (mean_of_pairs(paired.bco_pair), BETA),
    "sppo": (mean_of_pairs(paired.sppo), BETA),
    "dpop": (mean_of_pairs(paired.dpop), BETA | {"penalty": 50.0}),
    "discopop": (mean_of_pairs(paired.discopop), BETA | {"tau": 0.05}),
    "aot": (aot, BETA),
    "sft": (sft, {}),
    "dft": (dft, {}),
    "grpo": (grpo, CLIP),
    "ppo": (ppo, CLIP),
    "bradley_terry": (bradley_terry, {"center_coef": 0.0}),
    "pointwise": (mean_of_scored(pointwise), {"error": "cross_entropy", "huber_delta": 1.0}),
    "ordinal": (mean_of_scored(ordinal), {}),
}
"""Row of the table of losses -> the step's loss, and the settings that the formula book gives it."""
