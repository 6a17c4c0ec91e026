"""python -m benchmarks.tools [--quick] [--seed N] [--folder DIR]: a model of 135M parameters learns
to call a calculator.

SmolLM2-135M-Instruct, whose chat template has no tools, gets the template `chatml`. It imitates a
few calls (sft), then samples conversations with the calculator and trains on their outcome (GRPO):
without a grammar, and rewarded for a right answer after a valid call. The measure is the share of
held-out questions, with operands of two and three digits that no training question has, which are
solved so: before training, after sft and after GRPO, and with a calculator whose results are wrong.

Everything stays in the folder: the same command continues where it stopped. ``--quick``: few
questions and steps, without bars. Exit status: 0 less than 10 % are solved before training, more
than 60 % after it, and less than 10 % with the wrong calculator; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import valence
from benchmarks.tools.calculator import calculate, is_solved
from examples.demo import assets

TEMPLATES = {
    "+": ("What is {} + {}?", "What is {} plus {}?", "Add {} and {}.", "Sum of {} and {}?"),
    "-": ("What is {} - {}?", "What is {} minus {}?", "Take {1} from {0}.", "{} less {}?"),
    "*": ("What is {} * {}?", "What is {} times {}?", "Multiply {} by {}.", "{} multiplied by {}?"),
}
TOOLS = "benchmarks.tools.calculator:calculate"
WRONG_TOOLS = "benchmarks.tools.wrong_calculator:calculate"
ROLLOUT = {"tools": [TOOLS], "max_turns": 3, "max_new_tokens": 96}
NUM_DEMONSTRATIONS = 8
NUM_PROMPTS, NUM_QUESTIONS = 400, 100
STEPS = 20
BARS = {"before": 0.1, "after": 0.6, "wrong": 0.1}

Row = dict[str, Any]


def write(file: Path, rows: Sequence[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def questions(count: int, draw: random.Random, used: set[tuple[int, int]]) -> list[Row]:
    """Questions with pairs of operands that are in none of ``used``, to which they are added."""
    rows: list[Row] = []
    while len(rows) < count:
        a, b = (draw.randint(10, draw.choice((99, 999))) for _ in range(2))
        operation = draw.choice(list(TEMPLATES))
        if (a, b) in used:
            continue
        used.add((a, b))
        text = draw.choice(TEMPLATES[operation]).format(a, b)
        call = {"a": a, "operation": operation, "b": b}
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "answer": str(calculate(**call)),
                "call": call,
            }
        )
    return rows


def demonstration(row: Row, schema: Row) -> Row:
    """A conversation in which the calculator is called."""
    call = {"type": "function", "function": {"name": "calculate", "arguments": row["call"]}}
    return {
        "prompt": row["prompt"],
        "tools": [schema],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculate", "content": row["answer"]},
            {"role": "assistant", "content": f"The answer is {row['answer']}."},
        ],
    }


class Study:
    def __init__(self, folder: Path, seed: int, quick: bool) -> None:
        from transformers.utils.chat_template_utils import get_json_schema

        self.folder, self.seed, self.quick = folder, seed, quick
        folder.mkdir(parents=True, exist_ok=True)
        self.model = {"name": str(assets.smollm2()), "dtype": "float32"}
        draw, used = random.Random(seed), set[tuple[int, int]]()
        sizes = (8, 16, 8) if quick else (NUM_DEMONSTRATIONS, NUM_PROMPTS, NUM_QUESTIONS)
        shown, trained, held_out = (questions(size, draw, used) for size in sizes)
        schema = get_json_schema(calculate)
        self.shown = write(folder / "shown.jsonl", [demonstration(row, schema) for row in shown])
        self.trained = write(folder / "trained.jsonl", trained)
        self.held_out = write(folder / "held_out.jsonl", held_out)

    def train(self, name: str, sections: Row) -> Path:
        folder = self.folder / name
        if not (folder / "model").exists():
            start, cpu = time.monotonic(), time.process_time()
            valence.train(
                {
                    **sections,
                    "data": {"chat_template": "chatml", "max_length": 512} | sections["data"],
                    "run": {"dir": str(folder), "save_every": 5, "samples": {"prompts": 0}},
                }
            )
            minutes, cpu = (time.monotonic() - start) / 60, (time.process_time() - cpu) / 60
            print(f"{name}: {minutes:.1f} minutes, {cpu:.1f} minutes of CPU time", flush=True)
        return folder

    def imitate(self) -> Path:
        return self.train(
            "sft",
            {
                "method": "sft",
                "model": {**self.model, "lora": {"rank": 16}},
                "data": {"train": str(self.shown)},
                "train": {
                    "batch_size": 8, "epochs": 3, "learning_rate": 7e-4, "schedule": "constant",
                    "warmup": 0, "compile": "off", "seed": self.seed,
                },
            },
        )  # fmt: skip

    def reinforce(self, start: Path) -> Path:
        return self.train(
            "grpo",
            {
                "method": "grpo",
                "model": {**self.model, "name": str(start / "model"), "lora": {"rank": 16}},
                "data": {"train": str(self.trained)},
                "reward": "benchmarks.tools.calculator:solved",
                "rollout": ROLLOUT | {
                    "num_rollouts": 8, "temperature": 0.7, "measure_kl": False,
                },
                "train": {
                    "batch_size": 8, "max_steps": 2 if self.quick else STEPS,
                    "learning_rate": 2e-4, "schedule": "constant", "warmup": 0,
                    "compile": "off", "seed": self.seed,
                },
            },
        )  # fmt: skip

    def solved(self, name: str, target: Path | str, tools: str = TOOLS) -> float:
        """The share of held-out questions that a model solves, with its most likely tokens."""
        file = self.folder / f"answers_{name}.jsonl"
        command = [
            sys.executable, "-m", "valence", "sample", str(target), "--data", str(self.held_out),
            "--out", str(file), "--temperature", "0", "--max-new-tokens", "96", "-n", "1",
            f"rollout.tools=[{tools}]", "rollout.max_turns=3", "model.dtype=float32",
            "data.chat_template=chatml",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        share = sum(
            is_solved(
                str(row["completion"][-1]["content"]),
                row["info"]["answer"],
                [call["error"] for call in row["episode"]["calls"]],
            )
            for row in rows
        ) / len(rows)
        print(f"{name}: {share:.0%} of {len(rows)} held-out questions solved", flush=True)
        return share


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(mkdtemp(prefix="tools-"))
    study = Study(folder, arguments.seed, arguments.quick)
    before = study.solved("before", study.model["name"])
    first = study.imitate()
    study.solved("sft", first)
    last = study.reinforce(first)
    after = study.solved("grpo", last)
    wrong = study.solved("wrong", last, WRONG_TOOLS)
    if arguments.quick:
        return 0
    is_met = before < BARS["before"] and after > BARS["after"] and wrong < BARS["wrong"]
    print("the bars are met" if is_met else "a bar is not met")
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
