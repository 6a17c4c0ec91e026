"""python -m benchmarks.checkpoint [--quick]: what a checkpoint costs, in bytes, in seconds, and in
training that waits for it.

Random Llama-shaped models of 5, 25 and 100 million weights in float32 with AdamW train in the loop
of every run, two rows a step; the largest also with steps that leave a core free (as steps on an
accelerator do), and with an adapter. Saves in the background and saves that are waited for take
turns, with undisturbed steps between them. The stall of a save in the background is the time of its
call, and by how much the steps until it is written are slower. All numbers of saves are medians,
those of their parts means. Other work on the machine spoils the figures.
--quick: up to 25 million weights, and three saves of each kind instead of five.
Exit status: 0 all figures held, 1 some fell short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from benchmarks.checkpoint.cases import CASES, QUICK, Case, tokenizer_of_bytes
from benchmarks.checkpoint.measure import PARTS, Figures, measured

FLOOR = 12
"""Bytes of a trained weight and its two moments in float32."""
BYTES, MEMORY, COPIES, FREE, BUSY, RESUME = 1.02, 1.1, 2.0, 0.67, 1.0, 1.0
"""The most that is allowed.

Of every case: bytes, against the floor. Of the largest model: memory of a save in the background,
against the state's; its call, against a copy of the state into new memory; its stall with a core
free, and with all cores busy, against a save that is waited for; a resume, against the same. With
all cores busy, steps lose the seconds of a core that hashing and writing take.
"""

ROWS: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("trained weights (millions)", ".1f", lambda f: f.weights / 1e6),
    ("a step (s)", ".2f", lambda f: median(f.steps)),
    ("checkpoint (MB)", ".1f", lambda f: f.size / 1e6),
    ("  bytes a weight", ".2f", lambda f: f.size / f.weights),
    ("  memory for a background save (MB)", ".1f", lambda f: f.peak),
    ("saved and waited for (s)", ".3f", lambda f: median(f.at_once)),
    *((f"  {name}", ".3f", lambda f, name=name: f.parts[name]) for name in PARTS),
    ("  seconds of a core", ".3f", lambda f: median(f.worked)),
    ("stall of a save in the background (s)", ".3f", lambda f: f.stall),
    ("  the call", ".3f", lambda f: median(f.call)),
    ("  steps beside it, slower by", ".3f", lambda f: median(f.beside)),
    ("  until it is written", ".2f", lambda f: median(f.written)),
    ("a copy into new memory (s)", ".3f", lambda f: f.fresh),
    ("  into memory that is there", ".3f", lambda f: f.warm),
    ("resumed (s)", ".3f", lambda f: sum(f.resumed)),
    ("  checked", ".3f", lambda f: f.resumed[0]),
    ("  read and taken up", ".3f", lambda f: f.resumed[1] + f.resumed[2]),
)


def table(figures_by_case: dict[Case, Figures]) -> str:
    lines = [f"{'':38}" + "".join(f"{case.name:>24}" for case in figures_by_case)]
    for name, form, value in ROWS:
        lines.append(
            f"{name:38}"
            + "".join(f"{value(figures):24{form}}" for figures in figures_by_case.values())
        )
    return "\n".join(lines)


def verdict(figures_by_case: dict[Case, Figures]) -> tuple[str, bool]:
    """The last line, and whether everything held."""
    busy = max(
        (case for case in figures_by_case if case.threads > 1),
        key=lambda case: figures_by_case[case].weights,
    )
    free = next(case for case in figures_by_case if case.threads == 1)
    largest, at_once = figures_by_case[busy], median(figures_by_case[busy].at_once)
    figures = (
        ("bytes", max(f.size / f.weights for f in figures_by_case.values()) / FLOOR, BYTES),
        ("memory", largest.peak * 1e6 / largest.size, MEMORY),
        ("call", median(largest.call) / largest.fresh, COPIES),
        (
            "stall with a core free",
            figures_by_case[free].stall / median(figures_by_case[free].at_once),
            FREE,
        ),
        ("with all busy", largest.stall / at_once, BUSY),
        ("resume", sum(largest.resumed) / at_once, RESUME),
    )
    summary = "; ".join(
        f"{name} {v:.2f} (bar {bar:g}) {'held' if v <= bar else 'short'}"
        for name, v, bar in figures
    )
    return summary, all(v <= bar for _, v, bar in figures)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="up to 25 million weights, and three saves of each kind",
    )
    quick = parser.parse_args().quick
    disable_progress_bar()
    tokenizer = tokenizer_of_bytes()
    figures_by_case: dict[Case, Figures] = {}
    for case in QUICK if quick else CASES:
        with TemporaryDirectory() as folder:
            figures_by_case[case] = measured(
                case, Path(folder) / "run", tokenizer, 3 if quick else 5
            )
    line, held = verdict(figures_by_case)
    print(f"{table(figures_by_case)}\n\n{line}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
