"""python -m benchmarks.async_rollouts [--quick]: online training with and without a queue of
rounds that are sampled and scored in the background (`rollout.ahead`).

A tiny model trains with GRPO. A stand-in for a vLLM server takes a fixed time for a round, and so
does the reward, which works on several rounds at once. Runs alternate between no queue and queues
of 1, 2 and 4 rounds.
A round takes at least as long as sampling, and as sampling, scoring and training together divided
by one more than the length of the queue.

Before any time is printed, the losses of each run are compared with those of a run without a queue,
whose server answers with the weights of as many rounds before. They must be equal. Exit status: 0
all figures are within their bars, 1 some are not, 2 losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import valence
from tests.rollouts.vllm_server import serving
from tests.rollouts.weighted_server import WeightedServer
from tests.training.online.recipes import make, recipe_without_eval

QUEUES = (0, 1, 2, 4)
SPEEDUP, OVERHEAD = 2.5, 1.4
"""Bars: time of a round without a queue over that with a queue of 4, at least; time of a round over
the shortest possible one, at most."""


def train(
    place: Path, ahead: int, rounds: int, sampling: float, scoring: float, lag: int = 0
) -> tuple[list[float], list[float]]:
    """The losses of a run, and the time between its steps. sampling, scoring: seconds of a round.
    lag: see ``WeightedServer``.
    """
    os.environ["VALENCE_REWARD_SECONDS"] = str(scoring)
    folder = place / f"run-{len(list(place.glob('run-*')))}"
    times: list[float] = []
    with serving(WeightedServer(lag=lag, delay=lambda: sampling)) as server:
        rollout = {"engine": "vllm", "url": server.url, "check_prompts": 0, "num_rollouts": 4}
        settings = recipe_without_eval(
            place,
            "grpo",
            rollout={**rollout, "ahead": ahead},
            reward="benchmarks.async_rollouts.slow_reward:remainder",
            train={"max_steps": rounds, "epochs": 100.0},
            run={"dir": str(folder), "log_every": 1, "save_every": 1000},
        )
        valence.train(
            settings, quiet=True, callbacks=[lambda run, record: times.append(time.monotonic())]
        )
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in log if "loss" in row], [b - a for a, b in pairwise(times)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.async_rollouts", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="shorter waits, one run of each")
    is_quick = parser.parse_args().quick
    sampling, scoring = (0.5, 1.5) if is_quick else (1.0, 3.0)
    rounds, repeats = (14, 1) if is_quick else (20, 3)
    times: dict[int, list[float]] = {ahead: [] for ahead in QUEUES}
    with TemporaryDirectory() as name:
        place = Path(name)
        make(place)
        expected, training = {}, 0.0
        for ahead in QUEUES:
            expected[ahead], seconds = train(place, 0, rounds, 0, 0, lag=ahead)
            training = training or statistics.median(seconds)
        print(f"sampling {sampling:g} s, scoring {scoring:g} s, the rest {training:.2f} s")
        print(f"{'queue':>6}{'run':>5}{'s/round':>9}  last loss, expected")
        for repeat in range(repeats):
            for ahead in QUEUES:
                losses, seconds = train(place, ahead, rounds, sampling, scoring)
                if losses != expected[ahead]:
                    print(f"queue {ahead}: the losses differ: {losses}, {expected[ahead]}")
                    return 2
                steady = seconds[ahead : len(seconds) - ahead]
                times[ahead] += steady
                print(
                    f"{ahead:>6}{repeat:>5}{statistics.fmean(steady):>9.2f}"
                    f"  {losses[-1]:.6f}, {expected[ahead][-1]:.6f}"
                )
    means = {ahead: statistics.fmean(values) for ahead, values in times.items()}
    figures: list[tuple[str, float, float, bool]] = []
    for ahead, mean in means.items():
        shortest = max(sampling, (sampling + scoring + training) / (ahead + 1))
        figures.append((f"queue {ahead} over the shortest", mean / shortest, OVERHEAD, False))
    figures.append(("speedup of queue 4", means[0] / means[4], SPEEDUP, True))
    held = [value >= bar if is_minimum else value <= bar for _, value, bar, is_minimum in figures]
    print(
        "; ".join(
            f"{name} {value:.2f} (bar {bar:g}) {'held' if is_held else 'short'}"
            for (name, value, bar, _), is_held in zip(figures, held, strict=True)
        )
    )
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
