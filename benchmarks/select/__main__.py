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
from valence.data.load import DataFile, stream
from valence.jobs.audit_labels import C_STATES, hidden_states, load_policy
from valence.jobs.cross_fit import fit_logistic, standardize
from valence.jobs.select_prompts import farthest_first, prompt_unit
from valence.reports.stats import auc, mean_interval, quantile
from valence.trainer.targets import with_files
from valence.types import Judgement, content_id

FIRST, STEP = 20, 10
AT = {"quickstart": 100, "instructions": 60}
"""Labels at which orders are compared."""
LAST = {"quickstart": 140, "instructions": 80}
"""Labels at which the curves end."""
HELD_OUT = 0.3
BOOTSTRAP = 10
BAR = -0.02
"""Least mean difference of margin to random order at that number: it does no harm."""


@dataclass
class Pool:
    """answers, prompts: states [n, d]. groups: the prompt of each row."""

    answers: Tensor
    prompts: Tensor
    labels: list[bool]
    groups: list[str]


def compute_states(name: str, cache: Path | None) -> dict[str, Any]:
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


def rotated(states: Tensor) -> Tensor:
    """Standardized states in the fewest dimensions in which all distances are the same."""
    u, s, _ = torch.linalg.svd(standardize(states), full_matrices=False)
    return u * s


def make_pool(name: str, cache: Path | None) -> Pool:
    states = compute_states(name, cache)
    return Pool(
        rotated(states["states"]), rotated(states["pstates"]), states["labels"], states["prompts"]
    )


def predict(pool: Pool, rows: Sequence[int], included: Tensor) -> Tensor:
    """Probabilities [n, k] of k regressions. included[len(rows), k]: weights of the rows."""
    labels = torch.tensor([pool.labels[i] for i in rows], dtype=torch.float64)
    weights, biases = fit_logistic(pool.answers[list(rows)], labels, included, C_STATES)
    return torch.sigmoid(pool.answers @ weights + biases)


def ones(rows: Sequence[int]) -> Tensor:
    return torch.ones(len(rows), 1, dtype=torch.float64)


Order = Callable[[Pool, list[int], list[int], random.Random], list[int]]
"""The next rows to label, of those that are not labelled yet."""


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
    places = farthest_first(states[[*labelled, *others]], len(labelled), STEP)
    return [others[place] for place in places]


ORDERS: dict[str, Order] = {
    "random": by_chance,
    "margin": by_margin,
    "disagreement": by_disagreement,
    "answers": lambda pool, labelled, others, _: by_distance(pool.answers, labelled, others),
    "prompts": lambda pool, labelled, others, _: by_distance(pool.prompts, labelled, others),
}


def curve(pool: Pool, order: Order, seed: int, last: int) -> list[float]:
    """The held-out AUC after each step, up to ``last`` labels."""
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
    """Labels after which a mean curve reaches a value, interpolated; all if it does not."""
    for step, value in enumerate(means):
        if value >= target:
            if step == 0:
                return FIRST
            before = means[step - 1]
            return FIRST + STEP * (step - 1 + (target - before) / (value - before))
    return FIRST + STEP * (len(means) - 1)


Curves = Sequence[Sequence[float]]


def saved(curves: Curves, others: Curves, at: int) -> float:
    """Fewer labels than the ``at`` with which random order (``others``) reaches its AUC."""
    means, random_means = ([fmean(step) for step in zip(*curve_set, strict=True)]
                           for curve_set in (curves, others))  # fmt: skip
    return at - labels_for(means, random_means[(at - FIRST) // STEP])


def saved_interval(curves: Curves, others: Curves, at: int) -> tuple[float, float]:
    rng, values = random.Random(0), list[float]()
    for _ in range(200):
        places = rng.choices(range(len(curves)), k=len(curves))
        values.append(saved([curves[i] for i in places], [others[i] for i in places], at))
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
        shown = (FIRST, (FIRST + at) // 2, at, last)
        numbers = ", ".join(map(str, shown))
        print(f"{name}: {len(pool.labels)} rows, {len(seeds)} seeds; AUC after {numbers} labels")
        curves = {
            way: [curve(pool, order, seed, last) for seed in seeds] for way, order in ORDERS.items()
        }
        baseline = curves["random"]
        for way, values in curves.items():
            aucs = [fmean(curve[(n - FIRST) // STEP] for curve in values) for n in shown]
            line = f"{way:<13}" + " ".join(f"{value:.3f}" for value in aucs)
            if way != "random":
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
                if way == "margin":
                    figures.append((f"{way} {name} {difference:+.3f}>={BAR:g}", difference >= BAR))
            print(line, flush=True)
    print("; ".join(f"{label} {'held' if held else 'short'}" for label, held in figures))
    return 0 if all(held for _, held in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
