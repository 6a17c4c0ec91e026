"""python -m benchmarks.crash [--quick] [--kills N] [--seed S]: kill training processes
(SIGKILL) at random moments and at random file operations, and restart them until the run is done.
Weights, log and evaluations must equal those of an undisturbed run, bit for bit.

26 recipes on a small random model run two at a time, with one thread each. Three of them use
`--nproc 2`, where a process or the launcher is killed. --quick: some recipes, for about 90 seconds.
Exit status: 0 every run ended correctly, 1 some did not.
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
from benchmarks.crash.trial import PHASES, CrashHarness, Trial

KILLS, QUICK_KILLS = 200, 20
QUICK_SECONDS = 75
NUM_WORKERS = 2


class Series:
    """Trials of all cases in turn, until the minimum numbers of kills and seconds are reached."""

    def __init__(
        self, harness: CrashHarness, cases: list[Case], kills: int, seconds: float, seed: int
    ) -> None:
        self.harness, self.kills, self.seed = harness, kills, seed
        self.deadline = time.monotonic() + seconds
        self.numbers = itertools.count()
        self.cases = cases
        self.trials: dict[str, list[Trial]] = {case.name: [] for case in cases}
        self.lock = threading.Lock()

    @property
    def has_enough(self) -> bool:
        killed = sum(trial.kills for trials in self.trials.values() for trial in trials)
        return killed >= self.kills and time.monotonic() >= self.deadline

    def run(self) -> None:
        with ThreadPoolExecutor(NUM_WORKERS) as workers:
            list(workers.map(self.harness.undisturbed_run, self.cases))
            for done in [workers.submit(self._work) for _ in range(NUM_WORKERS)]:
                done.result()

    def _work(self) -> None:
        while not self.has_enough:
            with self.lock:
                number = next(self.numbers)
            case = self.cases[number % len(self.cases)]
            run = self.harness.folder / f"{case.name} {number}"
            trial = self.harness.run_with_random_kills(
                case, run, random.Random(f"{self.seed}/{number}")
            )
            with self.lock:
                self.trials[case.name].append(trial)
                for error in trial.errors:
                    print(
                        f"{case.name}, run {number} (killed {trial.kills} times): {error}",
                        flush=True,
                    )
            shutil.rmtree(run, ignore_errors=True)


def show(series: Series) -> None:
    """Print a line per case: runs, kills by phase, seconds of an undisturbed run, and mean seconds
    from a restart to the first training step.
    """
    print(
        f"{'case':26}{'runs':>5}{'kills':>6}"
        + "".join(f"{phase:>13}" for phase in PHASES)
        + f"{'run s':>7}{'restart s':>11}"
    )
    rows = [
        (name, trials, f"{series.harness.undisturbed[name][1].seconds:7.1f}")
        for name, trials in series.trials.items()
    ]
    rows.append(("all", [trial for trials in series.trials.values() for trial in trials], " " * 7))
    for name, trials, undisturbed in rows:
        phases = sum((trial.phases for trial in trials), Counter[str]())
        restarts = [seconds for trial in trials for seconds in trial.restarts]
        restart_seconds = f"{mean(restarts):11.2f}" if restarts else f"{'-':>11}"
        kills_by_phase = "".join(f"{phases[phase]:13}" for phase in PHASES)
        print(
            f"{name:26}{len(trials):5}{phases.total():6}{kills_by_phase}{undisturbed}{restart_seconds}"
        )


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
            CrashHarness(Path(folder)),
            cases,
            kills,
            QUICK_SECONDS if options.quick else 0,
            options.seed,
        )
        series.run()
        show(series)
    all_trials = [trial for trials in series.trials.values() for trial in trials]
    num_identical, num_kills = (
        sum(not trial.errors for trial in all_trials),
        sum(trial.kills for trial in all_trials),
    )
    is_passed = num_identical == len(all_trials) and num_kills >= kills
    identical_verdict = "held" if num_identical == len(all_trials) else "short"
    kills_verdict = "held" if num_kills >= kills else "short"
    print(
        f"identical {num_identical}/{len(all_trials)} {identical_verdict} "
        f"kills {num_kills}>={kills} {kills_verdict}"
    )
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
