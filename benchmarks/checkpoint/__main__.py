"""python -m benchmarks.checkpoint [--quick]: the size, time and training stall of checkpoints.

Random Llama-shaped models of 5, 25 and 100 million weights train in float32 with AdamW in Valence's
training loop, two rows per step. The largest model also trains with steps that leave a core free
(like steps on an accelerator), and with an adapter. Background saves and synchronous saves
alternate, with undisturbed steps between them. The stall of a background save is the time of its
call plus the slowdown of the steps until it is written. Figures of saves are medians, those of
their parts means. Other work on the machine distorts the figures.

--quick: up to 25 million weights, and three saves of each kind instead of five.
Exit status: 0 all figures are within their bars, 1 some are not.
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
"""Largest allowed ratios.

All cases: bytes over the minimum. The largest model: memory of a background save over that of the
state; its call over a copy of the state into new memory; its stall with a core free, and with all
cores busy, over a synchronous save; a resume over a synchronous save. With all cores busy, steps
lose the core seconds of hashing and writing.
"""

ROWS: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("trained weights (millions)", ".1f", lambda f: f.weights / 1e6),
    ("step (s)", ".2f", lambda f: median(f.steps)),
    ("checkpoint (MB)", ".1f", lambda f: f.size / 1e6),
    ("  bytes per weight", ".2f", lambda f: f.size / f.weights),
    ("  memory for a background save (MB)", ".1f", lambda f: f.peak),
    ("synchronous save (s)", ".3f", lambda f: median(f.at_once)),
    *((f"  {name}", ".3f", lambda f, name=name: f.parts[name]) for name in PARTS),
    ("  core seconds", ".3f", lambda f: median(f.worked)),
    ("stall of a background save (s)", ".3f", lambda f: f.stall),
    ("  the call", ".3f", lambda f: median(f.call)),
    ("  slowdown of steps during the write", ".3f", lambda f: median(f.during_write)),
    ("  until written", ".2f", lambda f: median(f.written)),
    ("copy into new memory (s)", ".3f", lambda f: f.fresh),
    ("  into existing memory", ".3f", lambda f: f.warm),
    ("resume (s)", ".3f", lambda f: sum(f.resumed)),
    ("  check", ".3f", lambda f: f.resumed[0]),
    ("  read and restore", ".3f", lambda f: f.resumed[1] + f.resumed[2]),
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
    """The last line, and whether all figures are within their bars."""
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
        ("stall with all cores busy", largest.stall / at_once, BUSY),
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
