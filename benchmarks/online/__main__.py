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

THINGS = (
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
"""Things of which the policy is asked only when it is measured."""
BAR = 0.15
"""Of VADER's compound score, which goes from -1 to 1."""

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
"""By method, what differs from the others' recipe."""

TINY_ROUND = {"num_rollouts": 8, "max_new_tokens": 6}
TINY_RATE, TINY_ROUNDS = 2.0e-3, 20
TINY_LOSS = {"rloo": {"kl_beta": 0.0}, "ppo": {"kl_beta": 0.0}}


@dataclass(frozen=True)
class Learnt:
    """Mean reward of held-out prompts before and after, divergence from the reference (nats of an
    answer), seconds.
    """

    before: float
    after: float
    kl: float
    seconds: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def prompts(folder: Path, chat: bool) -> None:
    """Two files of prompts, about different things."""
    for name, things in (("train", THINGS[HELD_OUT:]), ("held", THINGS[:HELD_OUT])):
        prompts = [question.format(thing) for thing in things for question in QUESTIONS]
        lines = [
            json.dumps({"prompt": [{"role": "user", "content": text}] if chat else text})
            for text in prompts
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def tiny(method: str, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    """The same with a tiny model, all of which learns."""
    settings = recipe(method, folder / "model", folder, seed, rounds)
    rollout = settings["rollout"] | TINY_ROUND
    train = settings["train"] | {"learning_rate": TINY_RATE}
    model, reward = {"name": str(folder / "model")}, "benchmarks.online.letters:share"
    return settings | {
        "model": model,
        "reward": reward,
        "rollout": rollout,
        "loss": TINY_LOSS.get(method, {}),
        "train": train,
    }


def recipe(method: str, model: Path, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
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


def learn(method: str, model: Path | None, folder: Path, seed: int, rounds: int) -> Learnt:
    """One run, from its start to its last evaluation; without a model of a tiny one."""
    prompts(folder, chat=model is not None)
    if model is None:
        make_model(str(folder / "model"))
    command = (
        recipe(method, model, folder, seed, rounds) if model else tiny(method, folder, seed, rounds)
    )
    began = time.monotonic()
    run = valence.train(command, quiet=True)
    first, last = run.evaluations[0], run.evaluations[run.total_steps]
    return Learnt(first["reward/mean"], last["reward/mean"], last["kl"], time.monotonic() - began)


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
        results: list[Learnt] = []
        for seed in range(seeds):
            with TemporaryDirectory() as place:
                results.append(learn(name, model, Path(place), seed, rounds))
            one = results[-1]
            print(
                f"{name:<12}{seed:>5}{one.before:>9.3f}{one.after:>8.3f}{one.gain:>+8.3f}{one.kl:>8.2f}{one.seconds:>7.0f}",
                flush=True,
            )
        mean = fmean(one.gain for one in results)
        bar = 0.0 if arguments.quick else BAR
        figures.append(
            (
                f"{name} {mean:+.2f}>={bar:g}",
                mean,
                mean >= bar and all(one.gain > 0 for one in results),
            )
        )
    print("; ".join(f"{text} {'held' if held else 'short'}" for text, _, held in figures))
    return 0 if all(held for *_, held in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
