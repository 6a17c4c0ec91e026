"""python -m benchmarks.crash [--quick] [--kills N] [--seed S]: kill training processes
(SIGKILL) at random moments and at random file operations, and restart them until the run is done.
Weights, log and evaluations must equal those of an undisturbed run, bit for bit.

22 recipes on a small random model run two at a time, with one thread each. Two of them use `--nproc
2`, where a process or the launcher is killed. --quick: some recipes, for about 90 seconds. Exit
status: 0 every run ended correctly, 1 some did not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from benchmarks.crash.cases import CASES, QUICK, Case
from benchmarks.crash.trial import PLACES, Laboratory, Trial

KILLS, QUICK_KILLS = 200, 20
QUICK_SECONDS = 75
AT_ONCE = 2


class Series:
    """Trials of all cases in turn, until there are enough kills."""

    def __init__(
        self, laboratory: Laboratory, cases: list[Case], kills: int, seconds: float, seed: int
    ) -> None:
        self.laboratory, self.kills, self.seed = laboratory, kills, seed
        self.ends = time.monotonic() + seconds
        self.numbers = itertools.count()
        self.cases = cases
        self.trials: dict[str, list[Trial]] = {case.name: [] for case in cases}
        self.lock = threading.Lock()

    @property
    def enough(self) -> bool:
        killed = sum(trial.kills for trials in self.trials.values() for trial in trials)
        return killed >= self.kills and time.monotonic() >= self.ends

    def run(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as workers:
            list(workers.map(self.laboratory.left_alone, self.cases))
            for done in [workers.submit(self._work) for _ in range(AT_ONCE)]:
                done.result()

    def _work(self) -> None:
        while not self.enough:
            with self.lock:
                number = next(self.numbers)
            case = self.cases[number % len(self.cases)]
            run = self.laboratory.folder / f"{case.name} {number}"
            trial = self.laboratory.until_done(case, run, random.Random(f"{self.seed}/{number}"))
            with self.lock:
                self.trials[case.name].append(trial)
                for error in trial.wrong:
                    print(
                        f"{case.name}, run {number} (killed {trial.kills} times): {error}",
                        flush=True,
                    )
            shutil.rmtree(run, ignore_errors=True)


def show(series: Series) -> None:
    """Print a line per case: runs, kills by place, seconds of an undisturbed run, and seconds until
    a restart trains.
    """
    print(
        f"{'case':26}{'runs':>5}{'kills':>6}"
        + "".join(f"{place:>13}" for place in PLACES)
        + f"{'run s':>7}{'restart s':>11}"
    )
    rows = [
        (name, trials, f"{series.laboratory.alone[name][1].seconds:7.1f}")
        for name, trials in series.trials.items()
    ]
    rows.append(("all", [trial for trials in series.trials.values() for trial in trials], " " * 7))
    for name, trials, alone in rows:
        places = sum((trial.places for trial in trials), Counter[str]())
        restarts = [seconds for trial in trials for seconds in trial.restarts]
        again = f"{mean(restarts):11.2f}" if restarts else f"{'-':>11}"
        fell = "".join(f"{places[place]:13}" for place in PLACES)
        print(f"{name:26}{len(trials):5}{places.total():6}{fell}{alone}{again}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crash", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"at least {QUICK_KILLS} kills of {len(QUICK)} of the recipes",
    )
    parser.add_argument(
        "--kills", type=int, metavar="N", help=f"minimum number of kills (default: {KILLS})"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the moments; times still vary",
    )
    options = parser.parse_args()
    kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    cases = [case for case in CASES if not options.quick or case.name in QUICK]
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory() as folder:
        series = Series(
            Laboratory(Path(folder)),
            cases,
            kills,
            QUICK_SECONDS if options.quick else 0,
            options.seed,
        )
        series.run()
        show(series)
    all_trials = [trial for trials in series.trials.values() for trial in trials]
    same, killed = (
        sum(not trial.wrong for trial in all_trials),
        sum(trial.kills for trial in all_trials),
    )
    held = same == len(all_trials) and killed >= kills
    print(f"identical {same}/{len(all_trials)} {'held' if same == len(all_trials) else 'short'} "
          f"kills {killed}>={kills} {'held' if killed >= kills else 'short'}")  # fmt: skip
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
