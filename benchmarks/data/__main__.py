"""python -m benchmarks.data [--quick]: 1,000 to 1,000,000 judgements of about 300 tokens.

Two processes read, tokenize and audit the same file at once, like the ranks of a run with
``--nproc 2``: first with an empty token cache, then with a filled one. The rows are random words of
the vocabulary of a real tokenizer (SmolLM2). The last line has every figure with its bar. Exit
status: 0 if all bars are met, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from examples.demo import assets

SIZES = (1_000, 10_000, 100_000, 1_000_000)
PROCESSES = 2
PROMPT_WORDS, COMPLETION_WORDS = (40, 120), (120, 240)
"""Minimum and maximum."""
MAX_MEMORY = 2000
"""Resident memory of a process, in MB."""
MAX_BYTES = 8.0
"""Bytes per token of the prompts and completions, including all columns."""
MAX_MINUTES = 20.0
"""Minutes for a million rows with an empty cache, at the rate of the largest file."""
MAX_CPU = 2.0
"""Milliseconds of processor time per row, of all processes, with an empty cache."""
MAX_WARM = 0.5
"""Time with a filled cache, relative to an empty one."""
MAX_STEP = 1.5
"""Time to build the micro-batches of a step from the arrays, relative to tuples."""


def write_rows(path: Path, number: int, words: Sequence[str]) -> None:
    """Write judgements of random words, some of them frequent, as in natural text."""
    generator = random.Random(number)
    weights = list(accumulate(1 / (rank + 10) for rank in range(len(words))))

    def text(bounds: tuple[int, int]) -> str:
        return " ".join(generator.choices(words, cum_weights=weights, k=generator.randint(*bounds)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            row = {
                "prompt": text(PROMPT_WORDS),
                "completion": text(COMPLETION_WORDS),
                "label": generator.random() < 0.5,
            }
            file.write(json.dumps(row) + "\n")


def words_of(model: Path) -> list[str]:
    """The lower-case words that are one token."""
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    words = [piece[1:] for piece in pieces if piece.startswith("\u0120")]
    return [word for word in words if word.isascii() and word.isalpha() and word.islower()]


def measure(model: Path, files: Sequence[Path], folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the measurements of all processes, twice per file: with an empty cache, then filled."""
    command = [sys.executable, "-m", "benchmarks.data.process", str(model), *map(str, files)]
    environment = {**os.environ, "VALENCE_TOKEN_CACHE": str(folder / "cache")}
    workers = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(PROCESSES)
    ]
    try:
        for _ in range(2 * len(files)):
            for worker in workers:  # all start together
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            results: list[dict[str, Any]] = []
            for worker in workers:
                assert worker.stdout is not None
                results.append(json.loads(worker.stdout.readline()))
            yield results
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 100,000 rows")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows")
    arguments = parser.parse_args()
    sizes = arguments.rows or (SIZES[:-1] if arguments.quick else SIZES)
    model = assets.smollm2()
    columns = ("rows", "cache", "seconds", "load", "tokens", "audit", "rows/s", "tokens/s",
               "cpu s", "peak MB", "worker MB", "bytes/token")  # fmt: skip
    print("".join(f"{name:>12}" for name in columns), flush=True)
    figures: dict[str, tuple[float, float, bool]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = words_of(model)
        files = [folder / f"{size}.jsonl" for size in sizes]
        for size, file in zip(sizes, files, strict=True):
            write_rows(file, size, words)
        results = measure(model, files, folder)
        for size in sizes:
            seconds, cpus = dict[str, float](), dict[str, float]()
            for cache in ("empty", "filled"):
                ranks = next(results)
                total = max(rank["seconds"] for rank in ranks)
                slowest = max(ranks, key=lambda rank: rank["seconds"])
                peak = max(rank["peak"] for rank in ranks)
                workers = max(rank["workers"] for rank in ranks)
                cpu = sum(rank["cpu"] for rank in ranks)
                num_tokens, num_bytes = ranks[0]["tokens"], ranks[0]["bytes"]
                row = (
                    f"{size:>12,}{cache:>12}{total:12.1f}{slowest['load']:12.1f}"
                    f"{slowest['tokenize']:12.1f}{slowest['audit']:12.1f}{size / total:12,.0f}"
                    f"{num_tokens / total:12,.0f}{cpu:12.1f}{peak:12,.0f}{workers:12,.0f}"
                    f"{num_bytes / num_tokens:12.2f}"
                )
                print(row, flush=True)
                seconds[cache], cpus[cache] = total, cpu
                for name, value, bar in (
                    ("memory", max(peak, workers), MAX_MEMORY),
                    ("bytes", num_bytes / num_tokens, MAX_BYTES),
                    ("step", max(rank["step"] for rank in ranks), MAX_STEP),
                ):
                    worst = max(value, figures[name][0]) if name in figures else value
                    figures[name] = worst, bar, worst <= bar
            minutes = seconds["empty"] / size * 1e6 / 60
            warm = seconds["filled"] / seconds["empty"]
            milliseconds = 1000 * cpus["empty"] / size
            figures["cpu"] = milliseconds, MAX_CPU, milliseconds <= MAX_CPU
            figures["minutes"] = minutes, MAX_MINUTES, minutes <= MAX_MINUTES
            figures["warm"] = warm, MAX_WARM, warm <= MAX_WARM
    line = " ".join(
        f"{name} {value:.2f} (bar {bar:g}) {'held' if held else 'short'}"
        for name, (value, bar, held) in figures.items()
    )
    print(f"\n{line}")
    return 0 if all(held for *_, held in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
