"""Reference formulas of the loss of a complete step in Python numbers: masks, sums, modifiers,
weights, averages, statistics.

Quantities without a gradient use the weights at which the derivative is taken.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, pstdev, stdev
from typing import Any

from tests.golden import test_paired as paired
from tests.golden.model_outputs import LEVELS, ModelOutputs, crossed, rows, sampled
from tests.golden.test_coupled import aot_formula, unpaired_formula
from tests.golden.test_policy import cispo_formula, gspo_formula, ppo_formula, rloo_formula
from tests.golden.test_unpaired import apo_formula, bco_formula, kto_formula
from valence.methods import METHODS
from valence.types import TokenizedExample


@dataclass(frozen=True)
class Step:
    """Which rows a step has (indices), what was measured of them, and the same at the weights where
    a slope is taken. known: of tokens when they were sampled.
    """

    name: str
    settings: dict[str, Any]
    chosen: Sequence[int]
    now: list[list[ModelOutputs]]
    held: list[list[ModelOutputs]]
    delta: float = 0.0
    known: tuple[str, ...] = ()

    @property
    def rows(self) -> list[TokenizedExample]:
        every = sampled(self.known) if self.known else rows(METHODS[self.name].kind)
        results = [every[i] for i in self.chosen]
        if self.name != "ordinal":
            return results
        return [
            replace(row, scores=tuple(1 + (LEVELS - 1) * share for share in row.scores))
            for row in results
        ]

    def sums(
        self, message: ModelOutputs, maximum: int | None = None, shared: Sequence[bool] = ()
    ) -> tuple[float, float]:
        """Of an answer under policy and reference, as a loss reads them.

        maximum: tokens that count in full. shared: tokens that the other side of the pair has too.
        """
        clamped = [self.clamped(x, ref) for x, ref in zip(message.logp, message.ref, strict=True)]
        share = [
            1.0 if maximum is None or t < maximum else self.settings["ld_alpha"]
            for t in range(message.n)
        ]
        if shared:
            weight = self.settings["shared_weight"]
            share = [
                s * (weight if is_shared else 1) for s, is_shared in zip(share, shared, strict=True)
            ]
        return dot(share, clamped), dot(share, message.ref)

    def clamped(self, logp: float, ref: float) -> float:
        if self.settings["humanline"] is None:
            return logp
        low, high = self.settings["humanline"]
        return ref + min(max(logp - ref, low), high)

    def pair(self, i: int) -> dict[str, float]:
        """The inputs of the loss of a pair."""
        row, (w, l) = self.rows[i], self.now[i]
        largest = min(w.n, l.n)
        ids = [
            [t for t, is_read in zip(a.ids, a.mask, strict=True) if is_read] for a in row.answers
        ]
        shared_w, shared_l = common(*ids)
        logp_w, ref_w = self.sums(w, largest, shared_w)
        logp_l, ref_l = self.sums(l, largest, shared_l)
        if self.settings["f_divergence"] != "reverse_kl":
            logp_w, logp_l = self.score(logp_w - ref_w), self.score(logp_l - ref_l)
            ref_w = ref_l = 0.0
        wrong = self.settings["label_smoothing"] if row.soft is None else 1 - row.soft
        return {
            "logp_w": logp_w,
            "logp_l": logp_l,
            "ref_w": ref_w,
            "ref_l": ref_l,
            "n_w": w.n,
            "n_l": l.n,
            "margin": row.margin,
            "wrong": wrong,
            "delta": self.delta,
        }

    def score(self, r: float) -> float:
        a = self.settings["f_alpha"]
        match self.settings["f_divergence"]:
            case "forward_kl":
                return 1 - math.exp(-r)
            case "js":
                return math.log(2) + paired.log_sigmoid(r)
            case _:
                return (1 - math.exp(-r) ** a) / a

    def weight(self, i: int) -> float:
        """Weight of a row, with wpo multiplied by the policy's probability of both answers of a
        pair.
        """
        if not self.settings["wpo"]:
            return self.rows[i].weight
        likely = [
            fmean(p - s for p, s in zip(x.logp, x.log_sum_sq, strict=True)) for x in self.held[i]
        ]
        return self.rows[i].weight * min(1.0, math.exp(sum(likely)))


def common(a: Sequence[int], b: Sequence[int]) -> tuple[list[bool], list[bool]]:
    """Which tokens are in common blocks: the longest one, and those before and after it."""
    sizes = {
        (i, j): next(
            (n for n in range(min(len(a) - i, len(b) - j)) if a[i + n] != b[j + n]),
            min(len(a) - i, len(b) - j),
        )
        for i in range(len(a))
        for j in range(len(b))
    }
    (i, j), size = max(sizes.items(), key=lambda item: item[1], default=((0, 0), 0))
    if not size:
        return [False] * len(a), [False] * len(b)
    before, after = common(a[:i], b[:j]), common(a[i + size :], b[j + size :])
    return before[0] + [True] * size + after[0], before[1] + [True] * size + after[1]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@cache
def read(formula: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of a formula."""
    return frozenset(inspect.signature(formula).parameters)


def call(formula: Callable[..., Any], numbers: dict[str, Any], settings: dict[str, Any]) -> float:
    """Call a formula with the numbers and settings that it reads."""
    return formula(**{k: v for k, v in (numbers | settings).items() if k in read(formula)})


def nll(step: Step) -> float:
    """The chosen answers' own term, of what was measured before any modifier."""
    likely = [
        (row.weight, sum(w.logp), w.n) for row, (w, _) in zip(step.rows, step.now, strict=True)
    ]
    if step.settings["nll_average"] == "token":
        return -sum(weight * logp for weight, logp, _ in likely) / sum(n for *_, n in likely)
    return -sum(weight * logp / n for weight, logp, n in likely) / len(likely)


def mean_of_pairs(formula: Callable[..., float]) -> Callable[[Step], float]:
    has_nll = "nll_weight" in read(formula)

    def total(step: Step) -> float:
        every = range(len(step.rows))
        result = sum(
            step.weight(i) * call(formula, step.pair(i), step.settings) for i in every
        ) / len(step.rows)
        return result if has_nll else result + step.settings["nll_weight"] * nll(step)

    return total


def aot(step: Step) -> float:
    pairs = [step.pair(i) for i in range(len(step.rows))]
    gaps, refs = ([p[f"{name}_w"] - p[f"{name}_l"] for p in pairs] for name in ("logp", "ref"))
    losses = aot_formula(gaps, refs, [p["wrong"] for p in pairs], step.settings["beta"])
    result = sum(step.weight(i) * loss for i, loss in enumerate(losses)) / len(pairs)
    return result + step.settings["nll_weight"] * nll(step)


def reference_points(step: Step) -> list[float]:
    """z0 of each row. Step order is the order of the rows, whose texts all differ."""
    scope, kind, count = (
        step.settings.get("z0_scope", "step"),
        METHODS[step.name].kind,
        len(step.chosen),
    )
    size, pairing = (count, "next") if scope == "step" else (scope["group"], scope["pairing"])
    results: list[float] = []
    for start in range(0, count, size):
        run = step.chosen[start : start + size]
        partners = {
            "next": [*run[1:], run[0]],
            "previous": [run[-1], *run[:-1]],
            "reversed": run[::-1],
        }[pairing]
        sums = [step.sums(crossed(kind, i, j)) for i, j in zip(run, partners, strict=True)]
        results += [max(0.0, fmean(logp - ref for logp, ref in sums))] * len(run)
    return results


def mean_of_answers(formula: Callable[..., float]) -> Callable[[Step], float]:
    def total(step: Step) -> float:
        points = reference_points(step) if "z0" in read(formula) else [0.0] * len(step.rows)
        result = 0.0
        for row, (message,), z0 in zip(step.rows, step.now, points, strict=True):
            logp, ref = step.sums(message)
            numbers = {"logp": logp, "ref": ref, "label": row.label, "z0": z0, "delta": step.delta}
            result += row.weight * call(formula, numbers, step.settings)
        return result / len(step.rows)

    return total


def aot_unpaired(step: Step) -> float:
    labels = [bool(row.label) for row in step.rows]
    ratios = [logp - ref for logp, ref in (step.sums(message) for (message,) in step.now)]
    losses = unpaired_formula(
        ratios, labels, step.settings["beta"], step.settings["label_smoothing"]
    )
    return sum(row.weight * loss for row, loss in zip(step.rows, losses, strict=True)) / min(
        sum(labels), labels.count(False)
    )


def sft(step: Step) -> float:
    tokens = sum(message.n for (message,) in step.now)
    return (
        -sum(
            row.weight * sum(message.logp)
            for row, (message,) in zip(step.rows, step.now, strict=True)
        )
        / tokens
    )


def dft(step: Step) -> float:
    tokens = sum(message.n for (message,) in step.now)
    results = [
        dot([math.exp(x) for x in held.logp], message.logp)
        for (held,), (message,) in zip(step.held, step.now, strict=True)
    ]
    return -sum(row.weight * x for row, x in zip(step.rows, results, strict=True)) / tokens


def from_teacher(step: Step) -> float:
    """Of the sampled tokens, the signal and its weight are numbers, not differentiated."""
    result = tokens = 0.0
    is_by_answer = step.name == "hindsight"
    for row, (held,), (message,) in zip(step.rows, step.held, step.now, strict=True):
        tokens += message.n
        if step.settings["target"] == "distribution":
            divergences = [
                divergence_of_lists(t, x, step.settings["beta"], step.settings["top_k"])
                for t, x in zip(message.all_teacher_logps, message.all_logps, strict=True)
            ]
            result += row.weight * sum(divergences) / (message.n if is_by_answer else 1)
            continue
        signals = [
            min(max(t - x, -step.settings["clip"]), step.settings["clip"])
            for t, x in zip(held.teacher, held.logp, strict=True)
        ]
        result -= row.weight * dot(signals, message.logp) / (message.n if is_by_answer else 1)
    return result / (len(step.rows) if is_by_answer else tokens)


def divergence_of_lists(
    teacher: Sequence[float], policy: Sequence[float], beta: float, top_k: int | None
) -> float:
    """Of two lists of log-probabilities, by the definition of the Kullback-Leibler divergence."""
    p, q = ([math.exp(x) for x in logps] for logps in (teacher, policy))
    if top_k is not None:
        best = sorted(range(len(p)), key=lambda v: -p[v])[:top_k]
        p, q = ([x[v] for v in best] + [1 - sum(x[v] for v in best)] for x in (p, q))
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@dataclass(frozen=True)
class Token:
    """Of a token that is read: what a loss of tokens reads of it (``now``; ``held`` where it is not
    differentiated), what was measured before any modifier, what the value head says, and what was
    known of it when it was sampled.
    """

    now: float
    held: float
    logp: float
    ref: float
    old: float
    adv: float
    critic: float
    known: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """An answer, and the weight of its row."""

    weight: float
    tokens: list[Token]

    @property
    def n(self) -> int:
        return len(self.tokens)

    def sum(self, name: str) -> float:
        return sum(getattr(token, name) for token in self.tokens)


def answers(step: Step, advantages: Sequence[Sequence[float]]) -> list[Answer]:
    """Those of all rows.

    Without a record of the policy that answered, the reference has (of stored answers), or the
    policy has just now (of answers with an advantage). advantages: of each answer, where none is
    known.
    """
    results: list[Answer] = []
    for i, row in enumerate(step.rows):
        for a, now, held, credit in zip(
            row.answers, step.now[i], step.held[i], advantages[i], strict=True
        ):
            read = [t for t, flag in enumerate(a.mask) if flag]
            tokens: list[Token] = []
            for k, t in enumerate(read):
                known = {name: values[t] for name, values in a.columns}
                old = known.get("old", held.logp[k] if "adv" in known else held.ref[k])
                here, fixed = (
                    step.clamped(now.logp[k], now.ref[k]),
                    step.clamped(held.logp[k], held.ref[k]),
                )
                critic = now.critic[k] if now.critic else 0.0
                adv = known.get("adv", credit)
                tokens.append(Token(here, fixed, now.logp[k], now.ref[k], old, adv, critic, known))
            results.append(Answer(row.weight, tokens))
    return results


def of_token(formula: Callable[..., float]) -> Callable[[Step, Answer], list[float]]:
    """The loss of each token, times its correction."""

    def losses(step: Step, answer: Answer) -> list[float]:
        return [
            corrected(step, t.old, t.known.get("sampler"))
            * call(
                formula,
                {"logp_t": t.now, "held_t": t.held, "old_t": t.old, "adv_t": t.adv},
                step.settings,
            )
            for t in answer.tokens
        ]

    return losses


def of_answer(formula: Callable[..., float]) -> Callable[[Step, Answer], list[float]]:
    """The loss of an answer, times its correction, as if each of its tokens had it: their mean is
    that of the answer.
    """

    def losses(step: Step, answer: Answer) -> list[float]:
        numbers = {
            "logp": answer.sum("now"),
            "old": answer.sum("old"),
            "n": answer.n,
            "adv": answer.sum("adv") / answer.n,
        }
        samplers = [t.known["sampler"] for t in answer.tokens if "sampler" in t.known]
        weight = corrected(step, answer.sum("old"), sum(samplers) if samplers else None)
        return [weight * call(formula, numbers, step.settings)] * answer.n

    return losses


def corrected(step: Step, old: float, sampler: float | None) -> float:
    largest = step.settings["correction"]
    return 1.0 if sampler is None or largest is None else min(math.exp(old - sampler), largest)


def divergence(step: Step, token: Token) -> float:
    x = token.ref - token.logp
    return step.settings["kl_weight"] * (
        x**2 / 2 if step.settings["kl_estimator"] == "k2" else math.exp(x) - x - 1
    )


def value_error(step: Step, token: Token) -> float:
    if not step.settings["value"] or "return" not in token.known:
        return 0.0
    wanted, before, clip = token.known["return"], token.known["value"], step.settings["value_clip"]
    ends = (
        [token.critic]
        if clip is None
        else [token.critic, min(max(token.critic, before - clip), before + clip)]
    )
    return step.settings["value_weight"] * max((end - wanted) ** 2 for end in ends) / 2


def within_group(step: Step) -> list[list[float]]:
    return [
        [(score - fmean(row.scores)) / (stdev(row.scores) + 1e-4) for score in row.scores]
        for row in step.rows
    ]


def above_group(step: Step) -> list[list[float]]:
    return [[score - fmean(row.scores) for score in row.scores] for row in step.rows]


def above_others(step: Step) -> list[list[float]]:
    return [
        [
            score - fmean(other for j, other in enumerate(row.scores) if i != j)
            for i, score in enumerate(row.scores)
        ]
        for row in step.rows
    ]


def over_step(step: Step) -> list[list[float]]:
    every = [score for row in step.rows for score in row.scores]
    return [
        [(score - fmean(every)) / (pstdev(every) + 1e-4) for score in row.scores]
        for row in step.rows
    ]


def policy(
    losses: Callable[[Step, Answer], list[float]],
    credit: Callable[[Step], list[list[float]]],
    average: str,
) -> Callable[[Step], float]:
    """The mean over tokens; over answers of means over their tokens; or over answers of sums over
    their tokens by one number.
    """

    def total(step: Step) -> float:
        every = answers(step, credit(step))
        sums = [
            a.weight
            * (
                sum(losses(step, a))
                + sum(divergence(step, t) + value_error(step, t) for t in a.tokens)
            )
            for a in every
        ]
        if average == "tokens":
            return sum(sums) / sum(a.n for a in every)
        if average == "constant":
            return fmean(sums) / (step.settings["max_tokens"] or 1)
        return fmean(x / a.n for x, a in zip(sums, every, strict=True))

    return total


def bradley_terry(step: Step) -> float:
    result = 0.0
    for row, (w, l) in zip(step.rows, step.now, strict=True):
        loss = -paired.log_sigmoid(w.score[0] - l.score[0] - row.margin)
        result += row.weight * (
            loss + step.settings["center_coef"] * (w.score[0] + l.score[0]) ** 2
        )
    return result / len(step.rows)


def mean_of_scored(
    item: Callable[[float, float, ModelOutputs, dict[str, Any]], float],
) -> Callable[[Step], float]:
    """each: score, target, all else that was measured, settings."""

    def total(step: Step) -> float:
        result = 0.0
        for row, (message,) in zip(step.rows, step.now, strict=True):
            inputs = [
                (x, t) for x, t in zip(message.score, row.scores, strict=True) if not math.isnan(t)
            ]
            result += (
                row.weight * fmean(item(x, t, message, step.settings) for x, t in inputs)
                if inputs
                else 0.0
            )
        return result / len(step.rows)

    return total


def pointwise(
    score: float, target: float, message: ModelOutputs, settings: dict[str, Any]
) -> float:
    e, delta = abs(score - target), settings["huber_delta"]
    match settings["error"]:
        case "cross_entropy":
            return -target * paired.log_sigmoid(score) - (1 - target) * paired.log_sigmoid(-score)
        case "squared":
            return e**2
        case _:
            return e**2 / 2 if e <= delta else delta * (e - delta / 2)


def ordinal(score: float, target: float, message: ModelOutputs, settings: dict[str, Any]) -> float:
    cumulative = [0.0, *(paired.sigmoid(theta - score) for theta in message.thresholds), 1.0]
    return -math.log(cumulative[int(target)] - cumulative[int(target) - 1])


IDLE = {
    "humanline": None,
    "ld_alpha": 1.0,
    "shared_weight": 1.0,
    "label_smoothing": 0.0,
    "f_divergence": "reverse_kl",
    "f_alpha": 0.5,
    "wpo": False,
    "nll_weight": 0.0,
    "nll_average": "token",
    "kl_weight": 0.0,
    "kl_estimator": "k3",
    "correction": 2.0,
    "value": False,
    "value_weight": 0.1,
    "value_clip": 0.2,
}
"""Settings of modifiers as they are by themselves."""
CLIP = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}
BETA = {"beta": 0.1}
OF_TEACHER: dict[str, Any] = {"clip": 5.0, "max_ratio": 2.0, "beta": 1.0, "top_k": None}
STEP_FORMULAS: dict[str, tuple[Callable[[Step], float], dict[str, Any]]] = {
    "kto": (
        mean_of_answers(kto_formula),
        BETA | {"desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
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
    "hindsight": (from_teacher, OF_TEACHER | {"target": "token"}),
    "distill": (from_teacher, OF_TEACHER | {"target": "distribution"}),
    "grpo": (policy(of_token(ppo_formula), within_group, "answers"), CLIP),
    "dr_grpo": (
        policy(of_token(ppo_formula), above_group, "constant"),
        CLIP | {"max_tokens": None},
    ),
    "dapo": (policy(of_token(ppo_formula), within_group, "tokens"), CLIP | {"eps_high": 0.28}),
    "gspo": (
        policy(of_answer(gspo_formula), within_group, "answers"),
        {"eps_low": 3e-4, "eps_high": 4e-4, "dual_clip": None},
    ),
    "cispo": (policy(of_token(cispo_formula), within_group, "tokens"), {"eps_high": 5.0}),
    "rloo": (policy(of_answer(rloo_formula), above_others, "answers"), {}),
    "reinforce_pp": (policy(of_token(ppo_formula), over_step, "tokens"), CLIP),
    "ppo": (policy(of_token(ppo_formula), over_step, "tokens"), CLIP),
    "bradley_terry": (bradley_terry, {"center_coef": 0.0}),
    "pointwise": (mean_of_scored(pointwise), {"error": "cross_entropy", "huber_delta": 1.0}),
    "ordinal": (mean_of_scored(ordinal), {}),
}
"""Row of the table of losses -> the step's loss, and the settings that the formula book gives
it.
"""
