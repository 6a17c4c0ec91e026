"""python -m benchmarks.align.amounts [--seeds N] [--only WORD] [--folder DIR] [--publish]: what
thumbs are worth, from 20 to 1,800 of them, unbalanced, and with wrong labels, which several methods
learn from.

SmolLM2-135M-Instruct has answered prompts. A thumb is up if VADER scores the answer above the
median. KTO trains an adapter on some of them, for three passes, at least 24 and at most 125 steps.
Several methods train on pairs of answers, or on the same answers as thumbs. Then the model answers
prompts about other topics, with the random numbers with which it answered them before. Every run
that is complete stays in the folder, so the same command continues where it was stopped. One seed
takes an hour and a half on two cores. ``--publish``: only rewrite the page of results from the runs
in the folder.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import valence
from benchmarks.align import page
from benchmarks.align.frontier import Row, chat, read, sample_answers, store, use_threads
from benchmarks.align.measures import HeldOut, vader
from benchmarks.online.__main__ import HELD_OUT, QUESTIONS, TOPICS
from benchmarks.tools.__main__ import write
from examples.demo import assets
from valence.apps.feedback.audit_labels import audit_labels
from valence.options import AuditOptions

MORE_QUESTIONS = (
    *QUESTIONS,
    "Describe {} in one sentence.",
    "Tell me one thing about {}.",
    "What comes to mind when you think of {}? Answer in one sentence.",
    "Give your opinion of {} in one line.",
    "How would you describe {} to a friend, in one sentence?",
    "Write the first sentence of a story about {}.",
)
NUM_ANSWERS, MAX_NEW_TOKENS, BATCH = 16, 40, 16
RATE = 2e-4
"""The learning rate of ``recipes/kto_lora.yaml``, which is for this model."""


@dataclass(frozen=True)
class Case:
    """A run. rows: thumbs. up: share of thumbs up. flipped: share of each kind with the opposite
    label. reviewed: rows whose labels are corrected, the most suspicious ones of
    ``valence audit --model``. is_balanced: with ``class_weights: auto``. seed: of the choice of
    rows, and of training. is_paired: the rows are pairs of two answers to a prompt, or these as
    thumbs, for methods that learn from thumbs.
    """

    rows: int
    up: float = 0.5
    flipped: float = 0.0
    reviewed: int = 0
    is_balanced: bool = False
    method: str = "kto"
    is_paired: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        words = [f"{self.rows}", f"{self.up:.2f}", f"{self.flipped:.1f}", f"{self.reviewed}"]
        words += ["balanced"] if self.is_balanced else []
        words += ["pairs", self.method] if self.is_paired else []
        return "-".join([*words, f"{self.seed}"])

    @property
    def steps(self) -> int:
        return min(125, max(24, ceil(3 * self.rows / BATCH)))


PAIRED = {
    "kto": (0.0, 0.2, 0.4), "bco": (0.0, 0.2, 0.4), "dpo": (0.0, 0.2, 0.4),
    "robust_dpo": (0.2, 0.4), "ipo": (0.0, 0.2, 0.4),
}  # fmt: skip
"""Methods on pairs, and shares of wrong ones. robust_dpo knows the share; without, it is dpo."""
ON_THUMBS = ("kto", "bco")
DECISIONS = 50
# Of 110 thumbs, 10 are up: those of 200 without 90 % of the thumbs up, as in the KTO paper.
ROWS, UP, FLIPPED = (20, 60, 200, 600, 1800), (1 / 11, 10 / 11), (0.1, 0.2, 0.3, 0.4)


def cases(num_seeds: int) -> list[Case]:
    """All runs, seed by seed."""
    kinds = [
        *(Case(rows) for rows in ROWS),
        *(Case(200, up, is_balanced=balanced) for up in UP for balanced in (False, True)),
        *(Case(110, UP[0], is_balanced=balanced) for balanced in (False, True)),
        *(Case(200, flipped=share) for share in FLIPPED),
        *(Case(200, flipped=share, reviewed=DECISIONS) for share in FLIPPED[1::2]),
        *(
            Case(200, flipped=share, method=method, is_paired=True)
            for method, shares in PAIRED.items()
            for share in shares
        ),
    ]
    return [replace(kind, seed=seed) for seed in range(num_seeds) for kind in kinds]


def thumbs_of(answers: Sequence[Row]) -> list[Row]:
    """The answers that were not cut off, with a thumb up above the median score."""
    rows = [row for row in answers if row["stop"] == "eos"]
    scores = [vader(row["completion"]) for row in rows]
    middle = median(scores)
    return [
        {"prompt": row["prompt"], "completion": row["completion"], "label": score > middle}
        for row, score in zip(rows, scores, strict=True)
    ]


def choose(thumbs: Sequence[Row], case: Case) -> list[Row]:
    """The rows of a run, in random order."""
    order = random.Random(f"rows {case.seed}").sample(thumbs, len(thumbs))
    num_up = round(case.rows * case.up)
    rows: list[Row] = []
    for label, number in ((True, num_up), (False, case.rows - num_up)):
        chosen = [row for row in order if row["label"] == label][:number]
        if len(chosen) < number:
            raise ValueError(f"{len(chosen)} of {number} rows with the label {label}")
        num_flipped = round(case.flipped * number)
        rows += [
            {**row, "label": label != (k < num_flipped), "info": {"label": label}}
            for k, row in enumerate(chosen)
        ]
    return random.Random(f"order {case.seed}").sample(rows, len(rows))


def choose_pairs(thumbs: Sequence[Row], case: Case) -> list[Row]:
    """Pairs of a run in random order: a random good and a random bad answer to each prompt."""
    rng = random.Random(f"pairs {case.seed}")
    answers: dict[str, tuple[list[str], list[str]]] = {}
    for row in thumbs:
        answers.setdefault(json.dumps(row["prompt"]), ([], []))[row["label"]].append(
            row["completion"]
        )
    prompts = [prompt for prompt, kinds in answers.items() if all(kinds)]
    pairs: list[Row] = []
    for k, prompt in enumerate(rng.sample(prompts, case.rows // 2)):
        bad, good = map(rng.choice, answers[prompt])
        is_wrong = k < round(case.flipped * case.rows / 2)
        sides = (bad, good) if is_wrong else (good, bad)
        row = {"prompt": json.loads(prompt), "info": {"wrong": is_wrong}}
        pairs.append(row | dict(zip(("chosen", "rejected"), sides, strict=True)))
    return rng.sample(pairs, len(pairs))


def as_thumbs(pairs: Sequence[Row]) -> list[Row]:
    return [
        {"prompt": p["prompt"], "completion": p[side], "label": side == "chosen", "info": p["info"]}
        for p in pairs
        for side in ("chosen", "rejected")
    ]


def corrected(file: Path, model: Path, decisions: int) -> list[Row]:
    """The rows of a file, of which the most suspicious ones have their label from before it was
    flipped. The order of the rows does not change.
    """
    ordered = file.with_suffix(".audited.jsonl")
    ordered.unlink(missing_ok=True)
    audit_labels([str(file)], AuditOptions(model=str(model), out=ordered))
    rows = read(file)
    if ordered.exists():  # otherwise the audit found no sign of wrong labels
        known = {row["completion"] for row in read(ordered)[:decisions]}
        for row in rows:
            if row["completion"] in known:
                row["label"] = row["info"]["label"]
    return rows


class Amounts:
    """Makes the runs that have no result yet. Everything stays in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = assets.smollm2()
        prompts = [
            [{"prompt": chat(question.format(t))} for t in topics for question in MORE_QUESTIONS]
            for topics in (TOPICS[HELD_OUT:], TOPICS[:HELD_OUT])
        ]
        write(folder / "prompts.jsonl", prompts[0])
        self.thumbs = thumbs_of(
            sample_answers(
                folder / "prompts.jsonl", self.model, folder / "answers.jsonl",
                NUM_ANSWERS, MAX_NEW_TOKENS, "bfloat16",
            )
        )  # fmt: skip
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.reference = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)
        held = [row["prompt"] for row in prompts[1]]
        self.held_out = HeldOut.of(self.tokenizer, held, MAX_NEW_TOKENS, samples=1)

    def measure(self, policy: Any) -> Row:
        """The rewards of completions of held-out prompts, and the KL divergence (nats)."""
        texts, completions, kl = self.held_out.complete(policy, self.reference, self.tokenizer)
        length = fmean(map(len, completions))
        return {"rewards": [vader(text) for text in texts], "kl": kl, "length": length}

    def start(self) -> Row:
        """The reference."""
        file = self.folder / "reference.json"
        if not file.exists():
            store(file, self.measure(self.reference))
        return json.loads(file.read_text())

    def has_result(self, case: Case) -> bool:
        return (self.folder / f"{case.name}.json").exists()

    def write_rows(self, case: Case) -> tuple[Path, int]:
        """The rows of a run, and how many answers have a wrong label."""
        file = self.folder / f"{case.name}.jsonl"
        if case.is_paired:
            pairs = choose_pairs(self.thumbs, case)
            write(file, as_thumbs(pairs) if case.method in ON_THUMBS else pairs)
            return file, 2 * sum(pair["info"]["wrong"] for pair in pairs)
        write(file, choose(self.thumbs, case))
        if case.reviewed:
            write(file, corrected(file, self.model, case.reviewed))
        return file, sum(row["label"] != row["info"]["label"] for row in read(file))

    def run(self, case: Case) -> Row:
        """The result of a run, which is made if there is none."""
        file, folder = self.folder / f"{case.name}.json", self.folder / f"run-{case.name}"
        if not file.exists():
            start = time.perf_counter()
            rows, num_wrong = self.write_rows(case)
            on_pairs = case.is_paired and case.method not in ON_THUMBS
            loss: Row = {"class_weights": "auto"} if case.is_balanced else {}
            if case.method == "robust_dpo":
                loss["label_smoothing"] = case.flipped
            recipe: Row = {
                "method": case.method,
                "model": {"name": str(self.model), "lora": {"rank": 16}},
                "data": {"train": str(rows)},
                "loss": loss,
                "train": {
                    "max_steps": case.steps, "batch_size": BATCH // 2 if on_pairs else BATCH,
                    "seed": case.seed, "learning_rate": RATE,
                },
                "run": {"dir": str(folder), "save_every": 1_000_000},
            }  # fmt: skip
            run = valence.build_run(recipe, fresh=True, quiet=True)
            run.fit()
            seconds = time.perf_counter() - start
            measured = self.measure(run.policy.causal)
            shutil.rmtree(folder)
            store(file, {**asdict(case), "wrong": num_wrong, "seconds": seconds, **measured})
        return json.loads(file.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.align.amounts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--only", default="", help="runs whose name contains this, such as pairs")
    parser.add_argument("--folder", type=Path, default=Path("runs/amounts"))
    parser.add_argument("--publish", action="store_true", help="write the page of results")
    arguments = parser.parse_args()
    disable_progress_bar()
    use_threads()
    runs = Amounts(arguments.folder)
    start, results = runs.start(), dict[str, Row]()
    for case in cases(arguments.seeds):
        is_new = not runs.has_result(case)
        if arguments.only not in case.name or (arguments.publish and is_new):
            continue
        results[case.name] = runs.run(case)
        if is_new:
            result = results[case.name]
            print(
                f"{case.name}: reward {fmean(result['rewards']):+.3f}, KL {result['kl']:.2f}, "
                f"{case.steps} steps, {result['seconds']:.0f} s of training",
                flush=True,
            )
    print(f"{page.amounts_table(results, start)}\n\n{page.noise_table(results, start)}")
    if arguments.publish:
        page.publish(page.AMOUNTS, start, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
