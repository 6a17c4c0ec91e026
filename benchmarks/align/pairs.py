"""python -m benchmarks.align.pairs [--methods NAME ...] [--folds N] [--folder DIR] [--publish]:
what methods learn from real pairs, in Valence and in TRL.

97 of the 300 pairs that llamafactory ships have at most 512 tokens. In each of three folds,
SmolLM2-135M-Instruct learns from two thirds of them with an adapter; the other third shows how many
pairs it ranks as they were rated, and whether it does so beyond length and form. Then the model
answers the prompts of that third, and a fixed judge compares the answers with those before
training. The judge is naive Bayes over the words of the 203 longer pairs, from which no method
learns. Every run that is complete stays in the folder, so the same command continues where it was
stopped. All runs take two hours on two cores. ``--publish``: only rewrite the page of results from
the runs in the folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import valence
from benchmarks.align import page
from benchmarks.align.amounts import BATCH, ON_THUMBS, RATE, as_thumbs
from benchmarks.align.frontier import Library, Row, run_trl, store, training_rows, use_threads
from benchmarks.align.measures import HeldOut, WordScore, answer_logps
from benchmarks.peers import NO_TRL, peer_python
from benchmarks.tools.__main__ import write
from examples.demo import assets
from valence.reports.form import form_of

METHODS = ("kto", "dpo", "simpo", "ipo", "bco")
IN_TRL = ("kto", "dpo")
FOLDS, PASSES = 3, 2
MAX_LENGTH, MAX_NEW_TOKENS = 512, 160
RANK, ALPHA, BETA = 16, 32, 0.1
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class Case:
    library: Library
    method: str
    fold: int

    @property
    def name(self) -> str:
        return f"{self.library}-{self.method}-{self.fold}"


def read_pairs() -> list[Row]:
    """All pairs in random order."""
    text = (assets.llamafactory_data() / "dpo_en_demo.json").read_text(encoding="utf-8")
    rows: list[Row] = []
    for row in json.loads(text):
        sides = (row["chosen"], row["rejected"])  # some are text with a dictionary
        chosen, rejected = (ast.literal_eval(s) if isinstance(s, str) else s for s in sides)
        prompt = [
            {"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]
        ]
        rows.append({"prompt": prompt, "chosen": chosen["value"], "rejected": rejected["value"]})
    return random.Random("pairs").sample(rows, len(rows))


class Pairs:
    """Makes the runs that have no result yet. Everything stays in the folder."""

    def __init__(self, folder: Path, peer: Path | None) -> None:
        self.folder, self.peer = folder, peer
        folder.mkdir(parents=True, exist_ok=True)
        self.model = assets.smollm2()
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        rows = read_pairs()
        self.pairs = [row for row in rows if self.length(row) <= MAX_LENGTH]
        self.judge = WordScore.fit(
            (row[side], side == "chosen")
            for row in rows
            if self.length(row) > MAX_LENGTH
            for side in ("chosen", "rejected")
        )

    def ids(self, row: Row) -> tuple[list[int], list[list[int]]]:
        """Tokens of the prompt, and of both answers with their ends."""
        prompt = self.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        answers = [
            [*self.tokenizer(row[side], add_special_tokens=False)["input_ids"], self.end]
            for side in ("chosen", "rejected")
        ]
        return prompt, answers

    def length(self, row: Row) -> int:
        prompt, answers = self.ids(row)
        return len(prompt) + max(map(len, answers)) + 1  # a line break may follow

    @property
    def end(self) -> int:
        return self.tokenizer.eos_token_id

    @cached_property
    def reference(self) -> Any:
        return self.load()

    def load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)

    def start(self) -> Row:
        """The number of pairs, the share that the judge and length rank right."""
        judged = [self.preference(row["chosen"], row["rejected"]) for row in self.pairs]
        longer = [len(row["chosen"]) > len(row["rejected"]) for row in self.pairs]
        return {"pairs": len(self.pairs), "judge": fmean(judged), "longer": fmean(longer)}

    def preference(self, answer: str, other: str) -> float:
        """1 if the judge prefers the answer, 0 if the other one, 0.5 if neither."""
        a, b = map(self.judge.log_odds, (answer, other))
        return 0.5 if a == b else float(a > b)

    def rows_of(self, case: Case) -> tuple[list[Row], list[Row]]:
        """To train on, and held out."""
        held_out = self.pairs[case.fold :: FOLDS]
        return [row for row in self.pairs if row not in held_out], held_out

    def logps(self, model: Any, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probabilities of the chosen and of the rejected answers."""
        prompts, answers = zip(*map(self.ids, rows), strict=True)
        return [answer_logps(model, prompts, [pair[side] for pair in answers]) for side in (0, 1)]

    def before(self, case: Case, held_out: HeldOut) -> Row:
        """Answers and log-probabilities of the reference."""
        file = self.folder / f"before-{case.fold}.json"
        if not file.exists():
            texts, _, _ = held_out.complete(self.reference, None, self.tokenizer)
            _, rows = self.rows_of(case)
            store(file, {"texts": texts, "logps": self.logps(self.reference, rows)})
        return json.loads(file.read_text())

    def measure(self, policy: Any, case: Case) -> Row:
        """Margins on the held-out pairs, and answers to their prompts.

        margins: of the log-probabilities of both answers, relative to the reference, or per token
        for simpo. before: these of the reference. forms: tokens and form of the chosen answer minus
        those of the rejected one. preferences: of the judge for the answer over that before
        training. differences: of their lengths in characters.
        """
        _, rows = self.rows_of(case)
        policy.eval()
        held_out = HeldOut.of(self.tokenizer, [row["prompt"] for row in rows], MAX_NEW_TOKENS, 1)
        before = self.before(case, held_out)
        counts = [[len(answer) for answer in answers] for _, answers in map(self.ids, rows)]
        per_token = case.method == "simpo"
        after, earlier = (
            [
                chosen / n_chosen - rejected / n_rejected if per_token else chosen - rejected
                for chosen, rejected, (n_chosen, n_rejected) in zip(*logps, counts, strict=True)
            ]
            for logps in (self.logps(policy, rows), before["logps"])
        )
        forms = [
            [
                [float(count), *form_of(row[side]).values()]
                for side, count in zip(("chosen", "rejected"), both, strict=True)
            ]
            for row, both in zip(rows, counts, strict=True)
        ]
        texts, completions, _ = held_out.complete(policy, None, self.tokenizer)
        both = list(zip(texts, before["texts"], strict=True))
        return {
            "margins": after if per_token else [a - b for a, b in zip(after, earlier, strict=True)],
            "before": earlier if per_token else None,
            "forms": [[a - b for a, b in zip(*sides, strict=True)] for sides in forms],
            "groups": [json.dumps(row["prompt"]) for row in rows],
            "preferences": [self.preference(text, old) for text, old in both],
            "differences": [len(text) - len(old) for text, old in both],
            "length": fmean(map(len, completions)),
        }

    def result_file(self, case: Case) -> Path:
        return self.folder / f"{case.name}.json"

    def run(self, case: Case) -> Row:
        """The result of a run, which is made if there is none."""
        file = self.result_file(case)
        if not file.exists():
            policy, result = (self.train if case.library == "valence" else self.train_in_trl)(case)
            store(file, {**asdict(case), **result, **self.measure(policy, case)})
        return json.loads(file.read_text())

    def train(self, case: Case) -> tuple[Any, Row]:
        train, _ = self.rows_of(case)
        data, folder = self.folder / f"{case.name}.jsonl", self.folder / f"run-{case.name}"
        on_thumbs = case.method in ON_THUMBS
        rows = [row | {"info": {}} for row in train]
        write(data, as_thumbs(rows) if on_thumbs else rows)
        batch_size = BATCH if on_thumbs else BATCH // 2
        recipe: Row = {
            "method": case.method,
            "model": {
                "name": str(self.model), "dtype": "bfloat16",
                "lora": {"rank": RANK, "alpha": ALPHA, "targets": "all-linear"},
            },
            "data": {"train": str(data), "max_length": MAX_LENGTH},
            "train": {
                "max_steps": PASSES * len(train) * 2 // BATCH, "batch_size": batch_size,
                "drop_last": True, "seed": case.fold, "learning_rate": RATE,
                "schedule": "constant", "warmup": 0, "clip_norm": 1.0, "compile": "off",
            },
            "run": {"dir": str(folder), "save_every": 1_000_000},
        }  # fmt: skip
        start = time.perf_counter()
        run = valence.build_run(recipe, fresh=True, quiet=True)
        run.fit()
        seconds = time.perf_counter() - start
        store(self.folder / f"{case.name}.rows", {"rows": training_rows(run)})
        shutil.rmtree(folder)
        return run.policy.causal, {"seconds": seconds}

    def train_in_trl(self, case: Case) -> tuple[Any, Row]:
        """The same rows in the same order, with the same adapter and rate."""
        assert self.peer is not None
        self.run(Case("valence", case.method, case.fold))
        rows = json.loads((self.folder / f"valence-{case.method}-{case.fold}.rows").read_text())
        batch = BATCH if case.method in ON_THUMBS else BATCH // 2
        adapter = self.folder / "trl-adapter"
        job = {
            "task": "positive", "trainer": case.method, "model": str(self.model),
            "dtype": "bfloat16", "held_out": asdict(HeldOut([], [], self.end, 0, 0, 0)),
            "steps": len(rows["rows"]) // batch, "rows": rows["rows"], "measured": [],
            "learning_rate": RATE, "seed": case.fold, "config": {"beta": BETA}, "batch": batch,
            "accumulation": 4,  # all rows at once need more than 15 GB
            "adapter": {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"},
            "save": str(adapter),
        }  # fmt: skip
        result = run_trl(self.peer, job, self.folder)
        from peft import PeftModel

        policy = PeftModel.from_pretrained(self.load(), str(adapter))
        return policy, {"seconds": result["seconds"], "versions": result["versions"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.align.pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME")
    parser.add_argument("--folds", type=int, default=FOLDS, help="number of folds")
    parser.add_argument("--folder", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--publish", action="store_true", help="write the page of results")
    arguments = parser.parse_args()
    disable_progress_bar()
    use_threads()
    peer = peer_python()
    if peer is None and not arguments.publish:
        print(NO_TRL, file=sys.stderr)
        return 2
    runs = Pairs(arguments.folder, peer)
    results = dict[str, Row]()
    for case in cases(arguments.methods, arguments.folds):
        is_new = not runs.result_file(case).exists()
        if arguments.publish and is_new:
            continue
        result = results[case.name] = runs.run(case)
        if is_new:
            right = fmean(margin > 0 for margin in result["margins"])
            print(f"{case.name}: {right:.0%} right, {result['seconds']:.0f} s of training")
    start = runs.start()
    print(page.pairs_table(results, start))
    if arguments.publish:
        page.publish(page.PAIRS, start, results)
    return 0


def cases(methods: Sequence[str], num_folds: int) -> list[Case]:
    """All runs, fold by fold. A run of TRL follows that of Valence, whose order of rows it has."""
    return [
        Case(library, method, fold)
        for fold in range(num_folds)
        for method in methods
        for library in (("valence", "trl") if method in IN_TRL else ("valence",))
    ]


if __name__ == "__main__":
    sys.exit(main())
