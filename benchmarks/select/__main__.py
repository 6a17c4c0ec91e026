"""python -m benchmarks.select [--quick] [--seeds N] [--only SET] [--cache FOLDER]: how many labels
`valence select` saves.

Labelled rows stand in for unlabelled ones. 30 % of the prompts of each set are held out. 20 random
rows of the rest are labelled, then 10 more in each step, in one of these orders:

- random
- margin: the least certain predictions of the classifier first (`valence select` with answers)
- disagreement: the largest disagreement of classifiers of 10 bootstrap samples first
- answers: answers that are far from the labelled ones and from each other first
- prompts: the same with prompts (`valence select` with prompts only)

The figure is the AUC on the held-out rows of a logistic regression on the hidden states of
SmolLM2-135M-Instruct, trained on the rows labelled so far. Differences to random order are paired:
both orders have the same first rows and held-out rows. `saved` is the number of labels that an
order saves to reach the mean AUC of random order after 100 labels, or 60 of the smaller set
(negative: it needs more). Intervals are of the mean over seeds, for `saved` from 200 bootstrap
samples of them. The sets are those of benchmarks.wrong_labels with their held-out rows. --cache:
store the hidden states in a folder. Exit status: 0 all figures reach their bars, 1 some do not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.wrong_labels.__main__ import SETS
from examples.demo import assets
from valence.apps.feedback.audit_labels import C_STATES, hidden_states, load_policy
from valence.apps.feedback.select_prompts import farthest_first, prompt_unit
from valence.data.load import DataFile, stream
from valence.reports.regression import fit_logistic, standardize
from valence.statistics import auc, mean_interval, quantile
from valence.targets import with_files
from valence.types import Judgement, content_id

FIRST, STEP = 20, 10
AT = {"quickstart": 100, "instructions": 60}
"""Number of labels at which orders are compared."""
LAST = {"quickstart": 140, "instructions": 80}
"""Number of labels at which the curves end."""
HELD_OUT = 0.3
BOOTSTRAP = 10
BAR = -0.02
"""Minimum mean difference of AUC between margin and random order at AT labels."""


@dataclass
class Pool:
    """answers, prompts: states [n, d]. groups: the prompt of each row."""

    answers: Tensor
    prompts: Tensor
    labels: list[bool]
    groups: list[str]


def compute_states(name: str, cache: Path | None) -> dict[str, Any]:
    """Hidden states of the answers and prompts of a set, with labels and prompt ids."""
    file = cache / f"{name}.pt" if cache else None
    if file and file.exists():
        return torch.load(file, weights_only=True)
    model = str(assets.smollm2())
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        train, held_out = SETS[name]()
        text = "".join(json.dumps(row) + "\n" for row in train + held_out)
        rows.write_text(text, encoding="utf-8")
        examples = [
            example for _, example in stream(DataFile(str(rows))) if isinstance(example, Judgement)
        ]
    policy, encoder = load_policy(model, with_files(model, [], ["data.max_length=2048"]))
    encoded = [(example, encoder.encode_all([example]).units) for example in examples]
    usable = [(example, units[0]) for example, units in encoded if units]
    units = [unit for _, unit in usable]
    prompts = [prompt_unit(unit.prompt_ids) for unit in units]
    states = {
        "states": torch.cat(hidden_states(policy, units)),
        "pstates": torch.cat(hidden_states(policy, prompts)),
        "labels": [bool(example.label) for example, _ in usable],
        "prompts": [content_id(example.prompt) for example, _ in usable],
    }
    if file:
        torch.save(states, file)
    return states


def rotate(states: Tensor) -> Tensor:
    """Standardized states [n, d], rotated into the fewest dimensions that keep all distances."""
    u, s, _ = torch.linalg.svd(standardize(states), full_matrices=False)
    return u * s


def make_pool(name: str, cache: Path | None) -> Pool:
    states = compute_states(name, cache)
    return Pool(
        rotate(states["states"]), rotate(states["pstates"]), states["labels"], states["prompts"]
    )


def predict(pool: Pool, rows: Sequence[int], included: Tensor) -> Tensor:
    """Probabilities [n, k] of k logistic regressions. included [len(rows), k]: row weights."""
    labels = torch.tensor([pool.labels[i] for i in rows], dtype=torch.float64)
    weights, biases = fit_logistic(pool.answers[list(rows)], labels, included, C_STATES)
    return torch.sigmoid(pool.answers @ weights + biases)


def ones(rows: Sequence[int]) -> Tensor:
    return torch.ones(len(rows), 1, dtype=torch.float64)


Order = Callable[[Pool, list[int], list[int], random.Random], list[int]]
"""Returns the next rows to label. Arguments: pool, labelled rows, other rows, generator."""


def by_chance(_: Pool, labelled: list[int], others: list[int], rng: random.Random) -> list[int]:
    return rng.sample(others, min(STEP, len(others)))


def by_margin(pool: Pool, labelled: list[int], others: list[int], _: random.Random) -> list[int]:
    probabilities = predict(pool, labelled, ones(labelled))[:, 0]
    return sorted(others, key=lambda i: abs(float(probabilities[i]) - 0.5))[:STEP]


def by_disagreement(
    pool: Pool, labelled: list[int], others: list[int], rng: random.Random
) -> list[int]:
    included = torch.zeros(len(labelled), BOOTSTRAP, dtype=torch.float64)
    for k in range(BOOTSTRAP):
        for i in rng.choices(range(len(labelled)), k=len(labelled)):
            included[i, k] += 1
    deviations = predict(pool, labelled, included).std(1)
    return sorted(others, key=lambda i: -float(deviations[i]))[:STEP]


def by_distance(states: Tensor, labelled: list[int], others: list[int]) -> list[int]:
    positions = farthest_first(states[[*labelled, *others]], len(labelled), STEP)
    return [others[position] for position in positions]


ORDERS: dict[str, Order] = {
    "random": by_chance,
    "margin": by_margin,
    "disagreement": by_disagreement,
    "answers": lambda pool, labelled, others, _: by_distance(pool.answers, labelled, others),
    "prompts": lambda pool, labelled, others, _: by_distance(pool.prompts, labelled, others),
}


def curve(pool: Pool, order: Order, seed: int, last: int) -> list[float]:
    """Held-out AUC after FIRST, FIRST + STEP, ... ``last`` labels."""
    rng = random.Random(seed)
    prompts = sorted(set(pool.groups))
    rng.shuffle(prompts)
    held_out = set(prompts[: round(HELD_OUT * len(prompts))])
    test = [i for i, group in enumerate(pool.groups) if group in held_out]
    others = [i for i, group in enumerate(pool.groups) if group not in held_out]
    labelled = rng.sample(others, FIRST)
    values: list[float] = []
    while True:
        probabilities = predict(pool, labelled, ones(labelled))[:, 0].tolist()
        ups, downs = (
            [probabilities[i] for i in test if pool.labels[i] is up] for up in (True, False)
        )
        values.append(auc(ups, downs))
        if len(labelled) >= last:
            return values
        others = [i for i in others if i not in set(labelled)]
        labelled = labelled + order(pool, labelled, others, rng)


def labels_for(means: Sequence[float], target: float) -> float:
    """Interpolated number of labels at which a mean curve reaches a value; all labels if it does
    not.
    """
    for step, value in enumerate(means):
        if value >= target:
            if step == 0:
                return FIRST
            before = means[step - 1]
            return FIRST + STEP * (step - 1 + (target - before) / (value - before))
    return FIRST + STEP * (len(means) - 1)


Curves = Sequence[Sequence[float]]


def saved(curves: Curves, others: Curves, at: int) -> float:
    """Labels that an order saves to reach the AUC of random order (``others``) at ``at``."""
    means, random_means = ([fmean(step) for step in zip(*curve_set, strict=True)]
                           for curve_set in (curves, others))  # fmt: skip
    return at - labels_for(means, random_means[(at - FIRST) // STEP])


def saved_interval(curves: Curves, others: Curves, at: int) -> tuple[float, float]:
    """Bootstrap interval (95 %) of ``saved`` over seeds."""
    rng, values = random.Random(0), list[float]()
    for _ in range(200):
        indices = rng.choices(range(len(curves)), k=len(curves))
        values.append(saved([curves[i] for i in indices], [others[i] for i in indices], at))
    return quantile(values, 0.025), quantile(values, 0.975)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.select", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 seeds")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=SETS, metavar="SET", default=list(SETS))
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args(arguments)
    disable_progress_bar()
    figures: list[tuple[str, bool]] = []
    for name in options.only:
        pool = make_pool(name, options.cache)
        seeds = range(8 if options.quick else options.seeds)
        at, last = AT[name], LAST[name]
        label_counts = (FIRST, (FIRST + at) // 2, at, last)
        numbers = ", ".join(map(str, label_counts))
        print(f"{name}: {len(pool.labels)} rows, {len(seeds)} seeds; AUC after {numbers} labels")
        curves = {
            order_name: [curve(pool, order, seed, last) for seed in seeds]
            for order_name, order in ORDERS.items()
        }
        baseline = curves["random"]
        for order_name, values in curves.items():
            aucs = [fmean(curve[(n - FIRST) // STEP] for curve in values) for n in label_counts]
            line = f"{order_name:<13}" + " ".join(f"{value:.3f}" for value in aucs)
            if order_name != "random":
                differences = [
                    one[(at - FIRST) // STEP] - other[(at - FIRST) // STEP]
                    for one, other in zip(values, baseline, strict=True)
                ]
                difference, (low, high) = fmean(differences), mean_interval(differences)
                first, end = saved_interval(values, baseline, at)
                line += (
                    f"  at {at}: {difference:+.3f} [{low:+.3f}, {high:+.3f}]"
                    f"  saved {saved(values, baseline, at):.0f} [{first:.0f}, {end:.0f}]"
                )
                if order_name == "margin":
                    figures.append(
                        (f"{order_name} {name} {difference:+.3f}>={BAR:g}", difference >= BAR)
                    )
            print(line, flush=True)
    print(
        "; ".join(f"{label} {'held' if is_reached else 'short'}" for label, is_reached in figures)
    )
    return 0 if all(is_reached for _, is_reached in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
