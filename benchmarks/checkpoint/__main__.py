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
from benchmarks.checkpoint.measure import PARTS, Figures, measure_case

MIN_BYTES = 12
"""Bytes of a trained weight and its two moments in float32."""
BYTES, MEMORY, COPIES, FREE, BUSY, RESUME = 1.02, 1.1, 2.0, 0.67, 1.0, 1.0
"""Maximum ratios.

BYTES: size of any checkpoint / MIN_BYTES per weight. The others are for the largest model. MEMORY:
additional memory of a background save / size of the state. COPIES: duration of the call that starts
a background save / copying the state into new memory. FREE, BUSY: stall of a background save /
duration of a synchronous save, with a free core and with all cores busy (then hashing and writing
take core seconds from the steps). RESUME: duration of a resume / that of a synchronous save.
"""

ROWS: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("trained weights (millions)", ".1f", lambda f: f.weights / 1e6),
    ("step (s)", ".2f", lambda f: median(f.steps)),
    ("checkpoint (MB)", ".1f", lambda f: f.size / 1e6),
    ("  bytes per weight", ".2f", lambda f: f.size / f.weights),
    ("  memory for a background save (MB)", ".1f", lambda f: f.peak),
    ("synchronous save (s)", ".3f", lambda f: median(f.synchronous)),
    *((f"  {name}", ".3f", lambda f, name=name: f.parts[name]) for name in PARTS),
    ("  core seconds", ".3f", lambda f: median(f.cpu_seconds)),
    ("stall of a background save (s)", ".3f", lambda f: f.stall),
    ("  the call", ".3f", lambda f: median(f.call)),
    ("  slowdown of steps during the write", ".3f", lambda f: median(f.during_write)),
    ("  until written", ".2f", lambda f: median(f.until_written)),
    ("copy into new memory (s)", ".3f", lambda f: f.copy_to_new),
    ("  into existing memory", ".3f", lambda f: f.copy_to_existing),
    ("resume (s)", ".3f", lambda f: sum(f.resume_seconds)),
    ("  check", ".3f", lambda f: f.resume_seconds[0]),
    ("  read and restore", ".3f", lambda f: f.resume_seconds[1] + f.resume_seconds[2]),
)


def table(figures_by_case: dict[Case, Figures]) -> str:
    """A column per case and a line per figure."""
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
    largest, synchronous_save = figures_by_case[busy], median(figures_by_case[busy].synchronous)
    figures = (
        ("bytes", max(f.size / f.weights for f in figures_by_case.values()) / MIN_BYTES, BYTES),
        ("memory", largest.peak * 1e6 / largest.size, MEMORY),
        ("call", median(largest.call) / largest.copy_to_new, COPIES),
        (
            "stall with a core free",
            figures_by_case[free].stall / median(figures_by_case[free].synchronous),
            FREE,
        ),
        ("stall with all cores busy", largest.stall / synchronous_save, BUSY),
        ("resume", sum(largest.resume_seconds) / synchronous_save, RESUME),
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
            figures_by_case[case] = measure_case(
                case, Path(folder) / "run", tokenizer, 3 if quick else 5
            )
    line, is_within_bars = verdict(figures_by_case)
    print(f"{table(figures_by_case)}\n\n{line}")
    return 0 if is_within_bars else 1


if __name__ == "__main__":
    sys.exit(main())
