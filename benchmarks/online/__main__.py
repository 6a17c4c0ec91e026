"""python -m benchmarks.online [--quick] [--tiny] [--only NAME ...] [--seeds N]:
train SmolLM2-135M-Instruct with LoRA online to write more positively. The reward is the score of
VADER's lexicon, evaluated on held-out prompts.

Each method runs with three seeds; `--quick` runs one method with one seed for few steps. `--tiny`
trains all weights of a random model of half a million weights to write lowercase letters, in
seconds. Exit status: 0 every method raises the mean held-out reward by its bar, and with every
seed; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from transformers.utils.logging import disable_progress_bar

import valence
from benchmarks.crash.cases import make_model
from examples.demo import assets

TOPICS = (
    "the weather",
    "a train station",
    "Monday morning",
    "an old bicycle",
    "the sea",
    "a cup of coffee",
    "my neighbour",
    "a long meeting",
    "the winter",
    "a city park",
    "an empty house",
    "homework",
    "a bus driver",
    "the night sky",
    "a broken phone",
    "a small dog",
    "cooking dinner",
    "a hospital",
    "the forest",
    "an exam",
    "the kitchen",
    "a letter",
    "a rainy day",
    "the moon",
    "a market",
    "an airport",
    "a garden",
    "a school",
    "a river",
    "a library",
    "a storm",
    "a wedding",
    "the office",
    "a bridge",
    "an island",
    "a mirror",
)
QUESTIONS = ("Write one sentence about {}.", "In one sentence, what do you think of {}?")
HELD_OUT = 12
"""Number of topics that occur only in the held-out prompts."""
BAR = 0.15
"""Minimum gain of VADER's compound score, which ranges from -1 to 1."""

ROUND = {"num_rollouts": 6, "max_new_tokens": 20}
CASES: dict[str, dict[str, Any]] = {
    "rejection": {"rollout": {"top_n": 2}, "train": {"learning_rate": 3.0e-4}},
    "online_kto": {"rollout": {"epochs": 2}, "train": {"learning_rate": 3.0e-4}},
    "online_dpo": {
        "rollout": {"epochs": 2},
        "loss": {"pairs": "all", "pair_margin": 0.2},
        "train": {"learning_rate": 1.5e-4},
    },
    "grpo": {"train": {"learning_rate": 3.0e-4}},
    "rloo": {"loss": {"kl_beta": 0.02}, "train": {"learning_rate": 3.0e-4}},
    "ppo": {
        "rollout": {"epochs": 2},
        "loss": {"kl_beta": 0.01},
        "train": {"learning_rate": 3.0e-4},
    },
}
"""Settings that differ from the shared recipe, by method."""

TINY_ROUND = {"num_rollouts": 8, "max_new_tokens": 6}
TINY_RATE, TINY_ROUNDS = 2.0e-3, 20
TINY_LOSS = {"rloo": {"kl_beta": 0.0}, "ppo": {"kl_beta": 0.0}}


@dataclass(frozen=True)
class RunResult:
    """Mean reward on held-out prompts before and after training, final KL divergence from the
    reference (nats per completion), and duration (s).
    """

    before: float
    after: float
    kl: float
    seconds: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def prompts(folder: Path, chat: bool) -> None:
    """Write train.jsonl and held.jsonl with prompts about different topics."""
    for name, topics in (("train", TOPICS[HELD_OUT:]), ("held", TOPICS[:HELD_OUT])):
        prompts = [question.format(topic) for topic in topics for question in QUESTIONS]
        lines = [
            json.dumps({"prompt": [{"role": "user", "content": text}] if chat else text})
            for text in prompts
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def tiny_recipe(method: str, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Recipe for full training of the tiny random model."""
    settings = recipe(method, folder / "model", folder, seed, rounds)
    rollout = settings["rollout"] | TINY_ROUND
    train = settings["train"] | {"learning_rate": TINY_RATE}
    model, reward = (
        {"name": str(folder / "model")},
        "benchmarks.online.lowercase_reward:share_of_lowercase",
    )
    return settings | {
        "model": model,
        "reward": reward,
        "rollout": rollout,
        "loss": TINY_LOSS.get(method, {}),
        "train": train,
    }


def recipe(method: str, model: Path, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Recipe of a run of ``rounds`` rollout rounds that trains an adapter of the real model."""
    case = CASES[method]
    rollout = ROUND | case.get("rollout", {})
    steps = rounds * rollout.get("epochs", 1)
    return {
        "method": method,
        "model": {"name": str(model), "dtype": assets.quick_dtype(), "lora": {"rank": 16}},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "held.jsonl"),
            "max_length": 128,
        },
        "reward": "vader",
        "rollout": rollout,
        "loss": case.get("loss", {}),
        "train": {
            "batch_size": 6,
            "epochs": 100,
            "max_steps": steps,
            "schedule": "constant",
            "warmup": 0.1,
            "seed": seed,
            **case["train"],
        },
        "eval": {"every": float(steps)},
        "run": {"dir": str(folder / f"{method}-{seed}"), "save_every": 10_000},
    }


def run_training(
    method: str, model: Path | None, folder: Path, seed: int, rounds: int
) -> RunResult:
    """Run one training. model: folder of the real model; None for the tiny one."""
    prompts(folder, chat=model is not None)
    if model is None:
        make_model(str(folder / "model"))
    settings = (
        recipe(method, model, folder, seed, rounds)
        if model
        else tiny_recipe(method, folder, seed, rounds)
    )
    start = time.monotonic()
    run = valence.train(settings, quiet=True)
    first, last = run.evaluations[0], run.evaluations[run.total_steps]
    return RunResult(
        first["reward/mean"], last["reward/mean"], last["kl"], time.monotonic() - start
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only grpo, one seed, few rounds")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, and a rule that it can learn"
    )
    arguments = parser.parse_args()
    names = ["grpo"] if arguments.quick else arguments.only or list(CASES)
    seeds, rounds = (
        (1, 6) if arguments.quick else (arguments.seeds, TINY_ROUNDS if arguments.tiny else 9)
    )
    disable_progress_bar()
    model, figures = None if arguments.tiny else assets.smollm2(), list[tuple[str, float, bool]]()
    print(f"{'method':<12}{'seed':>5}{'before':>9}{'after':>8}{'gain':>8}{'kl':>8}{'s':>7}")
    for name in names:
        results: list[RunResult] = []
        for seed in range(seeds):
            with TemporaryDirectory() as place:
                results.append(run_training(name, model, Path(place), seed, rounds))
            result = results[-1]
            print(
                f"{name:<12}{seed:>5}{result.before:>9.3f}{result.after:>8.3f}{result.gain:>+8.3f}{result.kl:>8.2f}{result.seconds:>7.0f}",
                flush=True,
            )
        mean_gain = fmean(result.gain for result in results)
        bar = 0.0 if arguments.quick else BAR
        figures.append(
            (
                f"{name} {mean_gain:+.2f}>={bar:g}",
                mean_gain,
                mean_gain >= bar and all(result.gain > 0 for result in results),
            )
        )
    print(
        "; ".join(f"{text} {'held' if is_reached else 'short'}" for text, _, is_reached in figures)
    )
    return 0 if all(is_reached for *_, is_reached in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
