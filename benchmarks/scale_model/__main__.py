"""python -m benchmarks.scale_model [--quick | --table]: check the predictions of the model
behind docs/scale.md.

The model counts the operations of a step, the bytes that travel, and the memory of each process.
Its inputs are measurements of two processes with one thread each: a step of 1,024 tokens that each
runs without the other, sums of gradients, and the optimizer's update. It predicts the time of
float32 steps of a model of 18 million weights with one process, with two, and with weights sharded
over two. The steps are then timed in turn; all figures are medians. Other work on the machine
distorts them. The second comparison is with published figures of Llama 3.1 8B: the figure for 8
GPUs sets a constant, and the one for 128 is predicted.

--quick: three rounds instead of fifteen. --table: print the tables of docs/scale.md without
measuring. Exit status: 0 all figures are within their bars, 1 some are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scale_model import cases, tables
from benchmarks.scale_model.measure import WAYS
from benchmarks.scale_model.this_machine import Step, machine, measured, steps

STEP, GAIN, LOSS, PUBLISHED = 1.3, 1.2, 1e-6, 1.1
"""Largest allowed deviations.

Predicted over measured, or the reverse: of a step, of the speedup of two processes, and of a
published figure; and the relative difference of losses from that of one process.
"""


def report(step_table: Sequence[Step], measured_values: Mapping[str, Any]) -> str:
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
        f"{s.name:14}{s.way:20}{s.predicted:13.3f}{s.measured:15.3f}{s.ratio:8.2f}   {s.loss:.7f}"
        for s in step_table
    ]
    return "\n".join(lines)


def verdict(step_table: Sequence[Step]) -> tuple[str, bool]:
    """The last line, and whether all figures are within their bars."""
    alone = {step.name: step for step in step_table if step.way == "one process"}
    figures = (
        *(
            (way, max(_off(step.ratio) for step in step_table if step.way == way), STEP)
            for way in WAYS
        ),
        (
            "gain",
            max(
                _off(alone[step.name].ratio / step.ratio)
                for step in step_table
                if step.way == "two processes"
            ),
            GAIN,
        ),
        ("losses", max(abs(step.loss / alone[step.name].loss - 1) for step in step_table), LOSS),
        *(
            (f"published, {name}", _off(tables.published(n) / rate), PUBLISHED)
            for name, n, rate in cases.PUBLISHED
        ),
    )
    summary = "; ".join(
        f"{name} {v:.3g} (bar {bar:g}) {'held' if v <= bar else 'short'}"
        for name, v, bar in figures
    )
    return summary, all(v <= bar for _, v, bar in figures)


def _off(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of fifteen")
    parser.add_argument(
        "--table", action="store_true", help="print only the tables of docs/scale.md"
    )
    arguments = parser.parse_args()
    if arguments.table:
        print(tables.text(), end="")
        return 0
    measured_values = measured(3 if arguments.quick else 15)
    step_table = steps(measured_values)
    line, held = verdict(step_table)
    print(f"{report(step_table, measured_values)}\n\n{line}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
