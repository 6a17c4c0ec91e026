"""python -m benchmarks.scale_model [--quick | --table]: check the predictions of the model
behind docs/scale.md.

The model counts the operations of a step, the bytes that travel, and the memory of each process.
Its inputs are measurements of two processes with one thread each: a step of 1,024 tokens that each
runs without the other, sums of gradients, and the optimizer's update. It predicts the time of
float32 steps of a model of 18 million weights with one process, with two, and with weights sharded
over two. The steps are then timed in turn; all figures are medians. Other work on the machine
distorts them. The second comparison is with published figures of Llama 3.1 8B: the figure for 8
GPUs sets a constant, and the one for 128 is predicted.

--quick: three rounds instead of fifteen. --table: print all tables of the model without
measuring. Exit status: 0 all figures are within their bars, 1 some are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scale_model import cases, tables
from benchmarks.scale_model.local_steps import Step, machine, measure, steps
from benchmarks.scale_model.measure import NUM_PROCESSES

STEP, GAIN, LOSS, PUBLISHED = 1.3, 1.2, 1e-6, 1.1
"""Maximum deviations.

STEP, GAIN, PUBLISHED: the larger of predicted / measured and its inverse, for the time of a step,
the speedup of two processes, and a published throughput. LOSS: relative difference of a loss from
that of one process.
"""


def report(step_table: Sequence[Step], measured_values: Mapping[str, Any]) -> str:
    """The rates of this machine, and predicted and measured times of each step."""
    lines = [
        "processes       step (GFLOPS)   sums (GB/s)   start of a sum (ms)   update (million "
        "weights/s)"
    ]
    for processes in (1, 2):
        here = machine(measured_values, processes)
        sums = f"{here.near / 1e9:14.2f}{here.start * 1e3:22.2f}" if processes > 1 else f"{'':36}"
        lines.append(f"{processes:9}{here.flops / 1e9:20.1f}{sums}{here.memory / 28e6:29.0f}")
    lines.append("\nstep                              predicted (s)   measured (s)   ratio   loss")
    lines += [
        f"{s.name:14}{s.variant:20}{s.predicted:13.3f}{s.measured:15.3f}{s.ratio:8.2f}   "
        f"{s.loss:.7f}"
        for s in step_table
    ]
    return "\n".join(lines)


def verdict(step_table: Sequence[Step]) -> tuple[str, bool]:
    """The last line, and whether all figures are within their bars."""
    one_process = {step.name: step for step in step_table if step.variant == "one process"}
    figures = (
        *(
            (
                variant,
                max(_deviation(step.ratio) for step in step_table if step.variant == variant),
                STEP,
            )
            for variant in NUM_PROCESSES
        ),
        (
            "gain",
            max(
                _deviation(one_process[step.name].ratio / step.ratio)
                for step in step_table
                if step.variant == "two processes"
            ),
            GAIN,
        ),
        (
            "losses",
            max(abs(step.loss / one_process[step.name].loss - 1) for step in step_table),
            LOSS,
        ),
        *(
            (f"published, {name}", _deviation(tables.published(n) / rate), PUBLISHED)
            for name, n, rate in cases.PUBLISHED
        ),
    )
    summary = "; ".join(
        f"{name} {v:.3g} (bar {bar:g}) {'held' if v <= bar else 'short'}"
        for name, v, bar in figures
    )
    return summary, all(v <= bar for _, v, bar in figures)


def _deviation(ratio: float) -> float:
    """The larger of a ratio and its inverse."""
    return max(ratio, 1 / ratio)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of fifteen")
    parser.add_argument("--table", action="store_true", help="print only the tables of the model")
    arguments = parser.parse_args()
    if arguments.table:
        print(tables.text(), end="")
        return 0
    measured_values = measure(3 if arguments.quick else 15)
    step_table = steps(measured_values)
    line, is_within_bars = verdict(step_table)
    print(f"{report(step_table, measured_values)}\n\n{line}")
    return 0 if is_within_bars else 1


if __name__ == "__main__":
    sys.exit(main())
